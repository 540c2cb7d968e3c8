"""`attach(where=...)`: matrices inside a model learn from the text, in steps where all of their units count alike."""

import pytest
import torch
from test_hf_attach import V, attach_strong, make, random_tokens

from fastweights.core import FastWeightError
from fastweights.hf import attach, detach, down_projections, load_attached, save_attached, scoring, using
from fastweights.hf.body import ROUNDS, balanced, teaches
from fastweights.hf.windows import Reading
from fastweights.torch import graphs

STEP = 0.3


def direction(g):
    """G / |G|: rows and columns of g brought to length 1 in turns."""
    for _ in range(ROUNDS):
        g = g / (g.norm(dim=0, keepdim=True) + 1e-150)  # of an output weight, columns belong to inputs
        g = g / (g.norm(dim=1, keepdim=True) + 1e-150)
    return g / g.norm()


def by_hand(model, names, tokens, spans, every=1):
    """Logits of spans (first, start, stop) of a row, with steps of the named weights after 1, 2 and every `every`."""
    weights, found = {n: p.detach().clone() for n, p in model.named_parameters()}, []
    for i, (first, start, stop) in enumerate(spans):
        now = weights | {n: weights[n].clone().requires_grad_() for n in names}
        logits = torch.func.functional_call(model, now, (tokens[:, first:stop],)).logits[0]
        found.append(logits[start - first :].detach())
        if (i + 1) % every and i + 1 not in (1, 2):  # of every = 1, 3 or 4
            continue
        begin = max(start - first - 1, 0) if every == 1 else 0
        loss = torch.nn.functional.cross_entropy(logits[begin:-1], tokens[0, first + begin + 1 : stop])
        gradients = torch.autograd.grad(loss, [now[n] for n in names])
        for n, g in zip(names, gradients, strict=True):
            change = direction(g.mT).mT if "c_proj" in n else direction(g)  # GPT-2's own are transposed
            weights[n] = weights[n] - STEP * dict(model.named_parameters())[n].norm() * change
    return torch.cat(found)


@pytest.mark.parametrize(
    "name, where, every", [("llama", "all", 1), ("gpt2", "middle", 1), ("gpt-neox", "all", 1), ("llama", "all", 4)]
)
@torch.no_grad()
def test_the_chosen_matrices_take_balanced_steps(name, where, every):
    model, tokens = make(name), random_tokens(2, 24)
    spans = [(max(0, a - 6), a, a + 6) for a in range(0, 24, 6)]
    names = down_projections(model, where)
    plain = model(tokens).logits
    with torch.enable_grad():
        wanted = [by_hand(model, names, tokens[row : row + 1], spans, every) for row in range(2)]
    attach(model, where=where, body_step=STEP, every=every)
    assert model.fast_head.hooks.body.names == names
    parts, state = [], None
    with using(model, head=False, cache=False):
        for first, start, stop in spans:
            out = model(tokens[:, first:stop], fast_state=state, fast_context=start - first, use_cache=False)
            state = out.fast_state
            parts.append(out.logits[:, start - first :])
            assert not out.logits.requires_grad
            assert not torch.is_grad_enabled()
    torch.testing.assert_close(torch.cat(parts, 1), torch.stack(wanted), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts[0], plain[:, :6], rtol=1e-12, atol=1e-12)  # nothing is known yet
    with using(model, head=False, cache=False, learn=False):  # answers by what it knows
        again = model(tokens[:, 12:], fast_state=state).logits
    with using(model, head=False, cache=False, body=False):
        assert torch.equal(model(tokens).logits, plain)
    assert not torch.allclose(again, model(tokens[:, 12:]).logits, atol=1e-3)
    detach(model)
    assert torch.equal(model(tokens).logits, plain)


def test_steps_are_balanced_and_early():
    """Rows and columns of unequal lengths, four orders of magnitude apart, come out alike within 5 %."""
    g = torch.randn(40, 60).double() * torch.logspace(-2, 2, 60).double() * torch.logspace(2, -2, 40).double()[:, None]
    for axis in (0, 1):
        lengths = balanced(g).norm(dim=axis)
        assert lengths.max() < 1.05 * lengths.min()
    assert balanced(g).norm().item() == pytest.approx(1)
    steps = {every: [n for n in range(1, 20) if teaches(n, every)] for every in (1, 3, 6)}
    assert steps == {1: list(range(1, 20)), 3: [1, 2, 3, 6, 9, 12, 15, 18], 6: [1, 2, 4, 6, 12, 18]}


@pytest.mark.parametrize("name, every, mode", [("llama", 3, "all"), ("gpt2", 3, "body"), ("llama", 1, "all")])
def test_windows_side_by_side_are_windows_one_after_the_other(name, every, mode):
    model, row = make(name), random_tokens(1, 75)
    head = attach_strong(model, where="all", body_step=STEP, every=every)
    how, parts = Reading(window=8, stride=4), scoring.PARTS[mode]
    assert how.stride % head.settings.refresh == 0
    one, held = scoring._attached(model, row, how, parts)
    found, bytes = scoring._beside(model, row, how, parts)
    torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9)
    still, _ = scoring._beside(model, row, how, parts | dict(body=False))
    assert not torch.allclose(found, still, atol=1e-3)
    assert bytes > 0
    assert held > 0


def test_windows_are_captured_unless_a_hook_looks_on(monkeypatch):
    model, row, keys = make("llama"), random_tokens(1, 41), []
    monkeypatch.setattr(graphs, "call", lambda key, f, given: keys.append((key[0], given[0].shape)) or f(*given))
    attach(model, where="all", body_step=STEP, every=4)
    how = Reading(window=8, stride=4)
    found, _ = scoring._beside(model, row, how, dict(head=False, cache=False))
    shapes = [("_teach", (1, 4)), ("_teach", (1, 8)), ("_teach", (2, 8)), ("_teach", (4, 8)), ("_read", (2, 8))]
    assert keys == [(name, torch.Size(shape)) for name, shape in shapes]
    keys.clear()
    handle = model.model.layers[0].register_forward_hook(lambda *a: None)
    seen, _ = scoring._beside(model, row, how, dict(head=False, cache=False))
    handle.remove()
    assert not keys
    assert torch.equal(seen, found)


def test_tokens_one_by_one_are_not_counted_as_windows():
    model, tokens = make("llama"), random_tokens(2, 24)
    attach(model, cache=False, where="all", body_step=STEP, every=4)
    state, learned = None, []
    for part in [*tokens[:, :18].split(6, 1), *tokens[:, 18:20].split(1, 1), tokens[:, 20:]]:
        before, state = state, model(part, fast_state=state).fast_state
        learned.append(before is None or not torch.equal(before.body[0], state.body[0]))
    assert learned == [True, True, False, False, False, True]  # windows 1, 2 and 4
    assert state.passes.tolist() == [4, 4]


def test_padding_teaches_nothing():
    model, tokens = make("llama"), random_tokens(2, 12)
    attach_strong(model, where="all", body_step=STEP)
    mask = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    both = model(tokens, attention_mask=mask, position_ids=positions).fast_state.body
    alone = model(tokens[1:, 5:]).fast_state.body
    for found, wanted in zip(both, alone, strict=True):
        torch.testing.assert_close(found[1], wanted[0], rtol=1e-7, atol=1e-9)


def test_a_prompt_is_learned_and_generation_goes_on():
    model, tokens = make("llama"), random_tokens(3, 9)
    how = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    attach(model, cache=False)
    plain = model.generate(tokens, **how)
    detach(model)
    attach(model, cache=False, where="all", body_step=STEP)
    found = model.generate(tokens, **how)
    torch.testing.assert_close(found.logits[0], plain.logits[0])  # the prompt is read before it is learned
    assert not torch.allclose(found.logits[1], plain.logits[1], atol=1e-3)
    assert not any(layer.keys.requires_grad for layer in found.past_key_values.layers if layer.keys is not None)
    assert model.generate(tokens, num_beams=2, max_new_tokens=4, do_sample=False).shape[1] <= 13


def test_training_of_the_head_goes_on():
    model, tokens = make("llama"), random_tokens(2, 11)
    head = attach_strong(model, where="middle")
    torch.nn.init.normal_(head.dense2, std=0.1)
    out = model(tokens, labels=tokens)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert not out.fast_state.body[0].requires_grad


def test_saved_and_loaded(tmp_path):
    model, tokens = make("llama"), random_tokens(1, 30)
    attach_strong(model, where=down_projections(model, "middle"), body_step=STEP, every=2, layer=False)
    assert scoring.modes(model) == ["static", "cache", "body", "body+cache", "dynamic", "dynamic+cache"]
    with using(model, head=False):
        without = model(tokens, fast_state=model(tokens).fast_state).logits
    state = model(tokens, fast_state=model(tokens).fast_state).fast_state
    wanted = model(tokens, fast_state=state).logits
    assert torch.equal(model(tokens, fast_state=model(tokens).fast_state).logits, without)  # no layer answers
    save_attached(model, tmp_path)
    other = make("llama")
    assert load_attached(other, tmp_path).hooks.body.every == 2
    torch.testing.assert_close(other(tokens, fast_state=state).logits, wanted)


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(where="lm_head.bias"), "where names 'lm_head.bias'"),
        (dict(where="middle", body_step=0.0), "body_step is 0.0"),
        (dict(where="middle", every=0), "every is 0"),
        (dict(where="middle", every=True), "every is True"),
        (dict(where="last"), "where names nothing"),  # of two layers
        (dict(where=["model.norm"]), "a matrix of real numbers"),
        (dict(where=3), "where is 3; expected one of"),
    ],
)
def test_what_cannot_learn_is_said(how, said):
    with pytest.raises(FastWeightError, match=said):
        attach(make("llama"), **how)


def test_a_state_or_context_of_another_text_is_refused():
    model, x = make("llama"), random_tokens(1, V)
    attach(model, where="all", layer=False, cache=False)
    state = model(x).fast_state
    with pytest.raises(FastWeightError, match="fast_state is that of 1 texts; expected 2: one per row"):
        model(x.expand(2, -1), fast_state=state)
    for n in (-1, x.shape[1], True):
        with pytest.raises(FastWeightError, match=f"fast_context is {n} .*expected 0 to {x.shape[1] - 1}"):
            model(x, fast_context=n)
    detach(model)
    attach(model, where="middle", layer=False, cache=False)
    with pytest.raises(FastWeightError, match=r"fast_state is of matrices .*the where that began it"):
        model(x, fast_state=state)


def test_inference_mode_is_refused():
    model = make("llama")
    attach(model, where="middle")
    with torch.inference_mode(), pytest.raises(FastWeightError, match="inference_mode forbids"):
        model(random_tokens(1, V))
    assert model(random_tokens(1, V)).logits.shape[-1] == V
