"""A head and a cache attached to models of other people: nothing changes until something is learned, then it helps."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from fastweights.hf import (
    FastWeightConfig,
    FastWeightForCausalLM,
    HeadSettings,
    ResidualHead,
    attach,
    detach,
    using,
)
from fastweights.torch import NeuralCache

V, D = 40, 16
END = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
WIDE = dict(vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **END)
NEXT = WIDE | dict(
    num_key_value_heads=1, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=8,
    linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, mlp_only_layers=[0, 1], layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=2, n_positions=64, **END)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **WIDE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, **WIDE)),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=V, hidden_size=D, num_hidden_layers=2, state_size=4, time_step_rank=2, **END)
    ),
    "qwen3-next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**NEXT)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(max_position_embeddings=64, **WIDE)),
    "ours": lambda: FastWeightForCausalLM(
        FastWeightConfig(vocab_size=V, hidden_size=D, num_attention_heads=2, mixers="delta*2", **END)
    ),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


@pytest.fixture(params=MODELS)
def model(request):
    return make(request.param)


def random_tokens(*shape, seed=1):
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(seed))


def attach_strong(model, **how):
    """A head that learns a lot from little: what it does to the logits shows."""
    torch.manual_seed(1)
    how = dict(refresh=4, step_size=2.0, clip=5.0, cache=NeuralCache(6, temperatures=(4.0,), shares=(0.2, 0.5))) | how
    return attach(model, 12, **how)


def embedding(V=V, D=D, seed=2):
    torch.manual_seed(seed)
    return torch.nn.Linear(D, V, bias=False, dtype=torch.float64)


def head_and_inputs(B=2, T=23, refresh=4):
    torch.manual_seed(0)
    head = ResidualHead(HeadSettings(D, 12, refresh=refresh, step_size=0.5, clip=0.7), dtype=torch.float64)
    return head, torch.randn(B, T, D, dtype=torch.float64), random_tokens(B, T), embedding()


def losses_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


@torch.no_grad()
def test_what_has_learned_nothing_is_exactly_the_model(model):
    tokens = random_tokens(2, 11)
    before, wrote = model(tokens).logits, model.generate(tokens, max_new_tokens=6, do_sample=False)
    last = model(tokens, logits_to_keep=2).logits
    head = attach(model)  # learning is on, and nothing is learned within 64 tokens but by the cache
    assert torch.equal(model(tokens).logits[:, 0], before[:, 0])
    with using(model, cache=False):
        assert torch.equal(model(tokens).logits, before)
    head.adapting = False
    assert torch.equal(model(tokens).logits, before)
    assert torch.equal(model(tokens, logits_to_keep=2).logits, last)
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), wrote)
    detach(model)
    attach_strong(model)
    assert not torch.allclose(model(tokens).logits, before, atol=1e-3)
    with using(model, head=False, cache=False):
        assert torch.equal(model(tokens).logits, before)
    detach(model)
    assert torch.equal(model(tokens).logits, before)
    assert all(p.requires_grad for p in model.parameters())
    assert not any("fast_head" in name for name in model.state_dict())


@torch.no_grad()
def test_logits_of_the_last_tokens_are_the_last_logits():
    model, tokens = make("llama"), random_tokens(2, 23)
    attach_strong(model)  # a chunk is four tokens
    every = model(tokens).logits
    for keep in (1, 4, 13, 22):
        torch.testing.assert_close(model(tokens, logits_to_keep=keep).logits, every[:, -keep:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_changed_in_other_precisions(dtype):
    model, tokens = make("llama").to(dtype), random_tokens(2, 11)
    before = model(tokens).logits
    head = attach(model)
    assert head.dense1.dtype == torch.float32
    with using(model, cache=False):
        assert torch.equal(model(tokens).logits, before)
    head.adapting = False
    assert torch.equal(model(tokens).logits, before)


def by_hand(head, x, tokens, E, state_of_row=None):
    """Losses of a row's tokens by autograd and a loop over chunks: dynamic evaluation of the two matrices."""
    c = head.settings
    p = [head.dense1.detach().clone(), head.dense2.detach().clone()]
    steps = head.log_steps.detach().exp()
    found = []
    for a in range(0, len(x) - 1, c.refresh):
        part = slice(a, min(a + c.refresh, len(x) - 1))
        W = [w.clone().requires_grad_() for w in p]
        u = x[part] / (x[part].square().mean(-1, keepdim=True) + 1e-6).sqrt()
        logits = E(x[part] + torch.relu(u @ W[0]).square() @ W[1])
        losses = torch.nn.functional.cross_entropy(logits, tokens[part.start + 1 : part.stop + 1], reduction="none")
        found.append(losses.detach())
        if part.stop - part.start == c.refresh:
            gradients = torch.autograd.grad(losses.mean(), W)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            p = [w - e * g * min(1.0, c.clip / norm) for w, e, g in zip(p, steps, gradients, strict=True)]
    return torch.cat(found)


@pytest.mark.parametrize("refresh", [1, 4, 16, 64])
def test_the_head_is_dynamic_evaluation_of_its_matrices(refresh):
    head, x, tokens, E = head_and_inputs(refresh=refresh)
    torch.nn.init.normal_(head.dense2, std=0.1)
    got, _ = head(x, tokens, E)
    wanted = torch.stack([by_hand(head, x[row], tokens[row], E) for row in range(2)])
    torch.testing.assert_close(losses_of(got.logits[:, :-1], tokens[:, 1:]), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.losses[:, 1:], wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.log_sums, got.logits.logsumexp(-1))
    if refresh < 23:
        assert not torch.allclose(got.logits, E(head.features(x)), atol=1e-3)


@pytest.mark.parametrize("cuts", [[1] * 23, [5, 8, 10], [22, 1]])
def test_a_cut_text_is_the_whole(cuts):
    head, x, tokens, E = head_and_inputs()
    whole, end = head(x, tokens, E)
    parts, state = [], None
    for some, theirs in zip(x.split(cuts, 1), tokens.split(cuts, 1), strict=True):
        found, state = head(some, theirs, E, state=state)
        parts.append(found.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits)
    n = int(end.waiting[0])
    for name in ("dense1", "dense2", "waiting"):
        torch.testing.assert_close(getattr(state, name), getattr(end, name))
    for name in ("x", "means", "tokens"):
        torch.testing.assert_close(getattr(state, name)[:, :n], getattr(end, name)[:, :n])
    last, _ = head(x, tokens, E, keep=3)
    torch.testing.assert_close(last.logits, whole.logits[:, -3:])
    torch.testing.assert_close(last.losses, whole.losses)


def test_the_head_is_causal():
    head, x, tokens, E = head_and_inputs()
    whole, _ = head(x, tokens, E)
    changed = tokens.clone()
    changed[:, 12] = changed[:, 12] % (V - 1) + 1
    other, _ = head(x, changed, E)
    torch.testing.assert_close(other.logits[:, :12], whole.logits[:, :12])
    assert not torch.allclose(other.logits[:, 12], whole.logits[:, 12])  # token 12 completes the chunk before it


@pytest.mark.parametrize("cuts", [[23], [6, 17], [1] * 23])
def test_padding_may_hold_anything(cuts):
    head, x, tokens, E = head_and_inputs(B=3)
    mask = torch.rand(3, 23, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[:, -1] = True
    x = torch.where(mask[..., None], x, torch.nan)
    parts, state = [], None
    for some, theirs, real in zip(x.split(cuts, 1), tokens.split(cuts, 1), mask.split(cuts, 1), strict=True):
        found, state = head(some, theirs, E, mask=real, state=state)
        parts.append(found.logits)
    got = torch.cat(parts, 1)
    for row in range(3):
        alone, end = head(x[row, mask[row]][None], tokens[row, mask[row]][None], E)
        torch.testing.assert_close(got[row, mask[row]], alone.logits[0])
        torch.testing.assert_close(state.dense2[row], end.dense2[0])


def test_training_sees_what_reading_does():
    """Losses of `score` are those of a stream; its gradients reach start and steps, first order."""
    head, x, tokens, E = head_and_inputs(T=24)
    torch.nn.init.normal_(head.dense2, std=0.1)
    wanted, _ = head(x, tokens, E)
    zero, state = torch.zeros(V, dtype=torch.float64), head.init_state(2)
    labels, mask = torch.cat([tokens[:, 1:], tokens[:, :1]], 1), torch.ones(2, 24, dtype=torch.bool)
    mask[1, 18:] = False
    run = lambda: head.score(x, labels, E.weight.detach(), zero, (state.dense1, state.dense2), mask)[0]  # noqa: E731
    losses = run()
    torch.testing.assert_close(losses[0, :-1], wanted.losses[0, 1:])
    torch.testing.assert_close(losses[1, :17], wanted.losses[1, 1:18])
    (losses * mask).sum().backward()
    assert all(p.grad.abs().min() >= 0 and p.grad.abs().sum() > 0 for p in head.parameters())
    step, eps = head.log_steps.grad[1].item(), 1e-6
    with torch.no_grad():
        head.dense1 *= 1.0
        up, down = [], []
        for sign, into in ((1, up), (-1, down)):
            head.log_steps[1] += sign * eps
            into.append((run() * mask).sum().item())
            head.log_steps[1] -= sign * eps
    assert step == pytest.approx((up[0] - down[0]) / (2 * eps), rel=0.2)  # first order: gradients count as constants


def test_gradients_reach_only_the_new_part(model):
    head = attach_strong(model)
    torch.nn.init.normal_(head.dense2, std=0.1)
    tokens = random_tokens(2, 11)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for name, p in model.named_parameters() if "fast_head" not in name)
    detach(model)
    attach(model, 12, freeze=False)
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "fast_head" not in name)


def test_generate_adapts_with_and_without_cache(model):
    tokens = random_tokens(3, 9)
    last = lambda: model.generate(tokens, max_new_tokens=10, do_sample=False, return_dict_in_generate=True,  # noqa: E731
                                  output_logits=True).logits[-1]  # fmt: skip
    plain = last()
    attach_strong(model)
    assert not torch.allclose(last(), plain, atol=1e-3)
    ways = [dict(do_sample=False), dict(do_sample=True)]
    out = model(tokens, use_cache=True)
    if hasattr(getattr(out, "past_key_values", None) or out.cache_params, "reorder_cache"):  # Mamba's of 5.0 has none
        ways.append(dict(num_beams=3, do_sample=False))
    for how in ways:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            found.append(model.generate(tokens, max_new_tokens=10, use_cache=use_cache, **how))
        assert torch.equal(*found), how


def test_left_padding_changes_nothing(model):
    attach_strong(model)
    tokens = random_tokens(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes = dict(position_ids=positions) if model.config.model_type not in ("mamba", "fastweights") else {}
    padded = model(tokens, attention_mask=mask, **takes).logits[1, 5:]
    torch.testing.assert_close(padded, model(tokens[1:, 5:]).logits[0], rtol=1e-5, atol=1e-6)
    how = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    wrote = model.generate(tokens, attention_mask=mask, **how)
    assert torch.equal(wrote[1, 5:], model.generate(tokens[1:, 5:], **how)[0])


@torch.no_grad()
def test_a_window_of_nothing_but_padding():
    """It teaches nothing, and its logits are 0 rather than whatever lay in memory."""
    head, embedding = ResidualHead(HeadSettings(4, 6, refresh=3)), torch.nn.Linear(4, 7)
    x, tokens, mask = torch.randn(2, 5, 4), torch.randint(7, (2, 5)), torch.zeros(2, 5, dtype=torch.bool)
    found, state = head(x, tokens, embedding, mask=mask)
    assert (found.logits == 0).all()
    got, _ = head(x, tokens, embedding, state=state)
    torch.testing.assert_close(got.logits, head(x, tokens, embedding)[0].logits)
    mask[0] = True
    assert (head(x, tokens, embedding, mask=mask)[0].logits[1] == 0).all()


@pytest.mark.parametrize("parts", [dict(), dict(head=False), dict(cache=False)])
@torch.no_grad()
def test_a_long_text_in_windows(parts):
    """Windows that overlap, with context, and logits of the last alone: the same stream of features, in one go."""
    model = make("llama")
    head = attach_strong(model)
    tokens = random_tokens(1, 24)
    hidden = {}
    hook = model.lm_head.register_forward_pre_hook(lambda m, given: hidden.update(x=given[0]), prepend=True)
    state, logits, body = None, [], []
    with using(model, **parts):
        for a in range(0, 24, 6):
            first = max(0, a - 6)
            keep = 6 if a < 18 else 2
            out = model(tokens[:, first : a + 6], fast_state=state, fast_context=a - first, logits_to_keep=keep)
            state = out.fast_state
            logits.append(out.logits)
            body.append(hidden["x"][:, a - first :])
    hook.remove()
    x = torch.cat(body, 1)
    wanted = head(x, tokens, model.lm_head)[0].logits if parts.get("head", True) else model.lm_head(x)
    if parts.get("cache", True):
        wanted, _ = head.hooks.cache.answer(x, tokens, wanted)
    torch.testing.assert_close(torch.cat(logits, 1), wanted[:, [*range(18), 22, 23]])


@torch.no_grad()
def test_logits_of_the_context_are_the_models():
    model = make("llama")
    tokens = random_tokens(1, 12)
    plain = model(tokens).logits
    attach_strong(model)
    out = model(tokens, fast_context=5).logits
    torch.testing.assert_close(out[:, :6], plain[:, :6])
    chosen = model(tokens, fast_context=5, logits_to_keep=torch.tensor([2, 9])).logits
    torch.testing.assert_close(chosen, out[:, [2, 9]])
