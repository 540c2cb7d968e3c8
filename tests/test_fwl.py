"""Fast Weight Layers in PyTorch against the brute-force oracle: a slow forward with explicitly updated parameters."""

from itertools import pairwise

import pytest
import torch
from fwl_oracle import SIZE, B, D, T, V, double, make, oracle, problem, steps_of  # noqa: F401
from oracle import assert_close
from torch import nn

from fastweights import FastWeightError
from fastweights.fwl_config import FWLState
from fastweights.torch import FWLBlock, fast_weight, make_labels
from fastweights.torch.framework import _padded


@pytest.mark.parametrize("form", [dict(), dict(fast_bias=False, shared_norm_step=True)], ids=["tensorflow", "jax"])
@pytest.mark.parametrize("normalizer", ["batch", "sequence", 7.0])
def test_is_the_published_mathematics(form, normalizer):
    block = make(normalizer=normalizer, **form)
    x, labels, weights = problem()
    per_row = {"batch": weights.sum().expand(B), "sequence": weights.sum(1)}.get(normalizer, torch.full((B,), 7.0))
    want = oracle(block, x, labels, weights, per_row, steps_of(block))
    got = block(x, labels, weights)
    assert_close(got.detach().numpy(), want.numpy())
    assert (got - block.slow_logits(x)).abs().max() > 0.01  # the updates matter here


@pytest.mark.parametrize("attn_chunks", [None, 1, 3, 9, 100])
def test_any_length_for_any_number_of_chunks(attn_chunks):
    x, labels, weights = problem()
    block, other = make(attn_chunks=attn_chunks), make(attn_chunks=2)
    other.load_state_dict(block.state_dict())
    assert_close(block(x, labels, weights).detach().numpy(), other(x, labels, weights).detach().numpy())


def test_one_hot_labels_are_the_same():
    x, labels, weights = problem()
    block = make()
    hot = nn.functional.one_hot(labels, V).double()
    assert torch.equal(block(x, labels, weights), block(x, hot, weights))


@pytest.mark.parametrize("how", [{}, dict(refresh=4), dict(refresh=4, within="cumulative")])
def test_no_tokens_leave_the_state_as_it_is(how):
    block, (x, labels, weights) = make(normalizer=3.0, **how), problem()
    state = block.run(x, labels, weights).state
    none = [y[:, :0] for y in (x, labels, weights)]
    out = block.run(*none, state)
    assert out.logits.shape == (B, 0, V)
    assert out.loss.shape == out.slow_loss.shape == (B, 0)
    assert all(torch.equal(a, b) for a, b in zip(out.state, state, strict=True))
    assert torch.equal(block.run(x, labels, weights, block.run(*none).state).loss, block.run(x, labels, weights).loss)
    assert block.loss(*none) == 0


OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 9)
refreshed = pytest.param(4, marks=pytest.mark.skipif(OLD, reason="PyTorch 2.8's compiler does not slice named tuples"))


@pytest.mark.parametrize("refresh", [None, refreshed])
def test_compiles_in_one_graph_and_weights_may_be_a_mask(refresh):
    """Forwards and backwards; a width that the first call tells is asked for as the compiler understands it."""
    block, (x, labels, weights) = make(refresh=refresh), problem()
    mask = weights > 0
    want = block.run(x, labels, mask.to(x.dtype), logits=False).loss
    run = torch.compile(lambda *a: block.run(*a, logits=False).loss, fullgraph=True, backend="eager")
    got = run(x, labels, mask)
    assert_close(got.detach().numpy(), want.detach().numpy())
    assert_close(*(torch.autograd.grad(y.sum(), block.steps)[0].numpy() for y in (got, want)))


def test_both_losses_are_cross_entropies():
    x, labels, weights = problem()
    block = make()
    out = block.run(x, labels, weights)
    for got, logits in ((out.loss, out.logits), (out.slow_loss, block.slow_logits(x))):
        want = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(B, T)
        assert_close(got.detach().numpy(), want.detach().numpy())
    mean = (out.loss * weights).sum() / weights.sum()
    assert_close(block.loss(x, labels, weights).detach().numpy(), mean.detach().numpy())


def parameters_as_inputs(block):
    names = [n for n, _ in block.named_parameters()]
    return names, [p.detach().clone().requires_grad_() for p in block.parameters()]


@pytest.mark.parametrize(
    "how", [dict(), dict(normalizer=5.0, decay=0.9, clip=0.2), dict(rule="delta")], ids=["plain", "clipped", "delta"]
)
def test_training_gradients_are_exact_to_second_order(how):
    block = make(**how)
    x, labels, weights = problem(1, 5)
    names, values = parameters_as_inputs(block)
    run = lambda x, *p: torch.func.functional_call(block, dict(zip(names, p, strict=True)), (x, labels, weights))  # noqa: E731
    torch.autograd.gradcheck(run, [x.requires_grad_(), *values])


def test_first_order_cuts_the_gradient_of_the_updates_alone():
    x, labels, weights = problem()
    full, cut = make(), make(first_order=True)
    cut.load_state_dict(full.state_dict())
    assert torch.equal(full(x, labels, weights), cut(x, labels, weights))
    for block in (full, cut):
        block.loss(x, labels, weights).backward()
    torch.testing.assert_close(full.steps.grad, cut.steps.grad)
    assert not torch.allclose(full.dense1.grad, cut.dense1.grad)


def test_a_constant_normalizer_is_causal_and_ignores_neighbours():
    block = make(normalizer=6.0)
    x, labels, weights = problem()
    want = block(x, labels, weights)
    for i in range(B):
        assert_close(block(x[i : i + 1], labels[i : i + 1], weights[i : i + 1])[0].detach().numpy(),
                     want[i].detach().numpy())  # fmt: skip
    later = weights.clone()
    later[:, 6:] = 0
    assert_close(block(x, labels, later)[:, :7].detach().numpy(), want[:, :7].detach().numpy())
    assert_close(block(x[:, :4], labels[:, :4], weights[:, :4]).detach().numpy(), want[:, :4].detach().numpy())


@pytest.mark.parametrize("normalizer", ["sequence", 6.0])
def test_packed_documents_do_not_leak(normalizer):
    block = make(normalizer=normalizer, decay=0.9)
    x, tokens, cu = torch.randn(1, 14, D), torch.randint(V, (1, 14)), [0, 5, 6, 6, 14]
    labels, weights = make_labels(tokens, cu_seqlens=torch.tensor(cu))
    out = block.run(x, labels, weights, cu_seqlens=torch.tensor(cu))
    for n, (a, b) in enumerate(pairwise(cu)):
        if a == b:
            continue
        alone = block.run(x[:, a:b], labels[:, a:b], weights[:, a:b])
        assert_close(out.logits[:, a:b].detach().numpy(), alone.logits.detach().numpy())
        for name, got, want in zip(FWLState._fields, out.state, alone.state, strict=True):
            assert_close(got[n].detach().numpy(), want[0].detach().numpy(), name=name)


def test_padding_changes_nothing():
    block = make(normalizer="sequence")
    x, labels, weights = problem(1, 6)
    want = block(x, labels, weights)
    more = torch.randn(1, 3, D), torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3)
    padded = [torch.cat([a, b], 1) for a, b in zip((x, labels, weights), more, strict=True)]
    assert_close(block(*padded)[:, :6].detach().numpy(), want.detach().numpy())


@pytest.mark.parametrize("rule", ["sum", "delta"])
def test_keys_filled_up_change_nothing(rule):
    """What a GPU runs."""
    q, k, v = torch.randn(2, 9, 1, 5), torch.randn(2, 9, 1, 5) / 5, torch.randn(2, 9, 1, 3)
    how = dict(rule=rule, read="before", chunk_size=4)
    for state in (None, torch.randn(2, 1, 5, 3)):
        for a, b in zip(_padded(q, k, v, state, 3, **how), fast_weight(q, k, v, state=state, **how), strict=True):
            assert_close(a.numpy(), b.numpy())


def test_tied_unembedding_is_shared():
    embedding = nn.Embedding(V, SIZE)
    block = FWLBlock(SIZE, V, inputs=D, unembed=embedding.weight)
    assert block.unembed is embedding.weight
    assert "unembed_bias" not in dict(block.named_parameters())
    x, labels, weights = problem()
    block.loss(x, labels, weights).backward()
    assert embedding.weight.grad.abs().sum() > 0
    assert_close(block.slow_logits(x).detach().numpy(),
                 (slow_n(block, x) @ embedding.weight.T).detach().numpy())  # fmt: skip


def slow_n(block, x):
    h = torch.relu(x @ block.dense1 + block.bias1) ** 2 @ block.dense2 + block.bias2
    return nn.functional.layer_norm(h, (SIZE,), block.scale, block.shift, block.config.eps)


def test_input_width_is_inferred_and_saved():
    block = FWLBlock(SIZE, V)
    x, labels, weights = problem()
    want = block(x, labels, weights)
    other = FWLBlock(SIZE, V)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x, labels, weights), want)


def test_bfloat16_autocast_stays_close():
    torch.set_default_dtype(torch.float32)
    block = FWLBlock(16, 50, inputs=8)
    x, tokens = torch.randn(2, 70, 8), torch.randint(50, (2, 70))
    labels, weights = make_labels(tokens)
    want = block(x, labels, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, loss = block(x, labels, weights), block.loss(x, labels, weights)
    loss.backward()
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.05)


def test_make_labels():
    tokens = torch.tensor([[3, 1, 2, 0, 0], [1, 1, 2, 3, 4]])
    labels, weights = make_labels(tokens, pad_id=0)
    assert labels[:, :-1].tolist() == tokens[:, 1:].tolist()
    assert weights.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    _, weights = make_labels(tokens[1:], cu_seqlens=torch.tensor([0, 2, 5]))
    assert weights.tolist() == [[1, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y, w: (x, y + V, w), "labels has .*; expected 0 to 4: vocab_size is 5"),
        (lambda x, y, w: (x, y - V, w), "labels has -5; expected 0 to 4"),
        (
            lambda x, y, w: (x, torch.zeros(B, T, 6), w),
            r"labels has shape \(2, 9, 6\); expected \(B, T, 5\) for one-hot",
        ),
        (lambda x, y, w: (x, y[:, :3], w), r"labels has shape \(2, 3\); expected \(2, 9\): one per token of x"),
        (lambda x, y, w: (x, y, w[:1]), r"weights has shape \(1, 9\); expected \(2, 9\)"),
        (lambda x, y, w: (x, y, -w), "weights has -.*; expected finite numbers of at least 0"),
        (lambda x, y, w: (x, y, w * torch.nan), "weights has nan; expected finite numbers of at least 0"),
        (lambda x, y, w: (x[..., :2], y, w), r"x has shape \(2, 9, 2\); expected \(B, T, 3\)"),
    ],
)
def test_call_errors(change, message):
    with pytest.raises(FastWeightError, match=message):
        make()(*change(*problem()))


def test_other_errors():
    with pytest.raises(
        FastWeightError, match=r"state.dense1 has shape \(3, 1, 4, 16\); expected \(2, 1, 4, 16\): x has 2"
    ):
        block = make(normalizer=4.0)
        block.run(*problem(), state=block.init_state(3))
    with pytest.raises(FastWeightError, match="normalizer is 'batch'; expected a number of tokens for step"):
        make().step(torch.randn(B, D), None, make().init_state(B))
    with pytest.raises(FastWeightError, match="normalizer is 'mean'; expected 'batch', 'sequence' or a number"):
        FWLBlock(SIZE, V, normalizer="mean")
    with pytest.raises(FastWeightError, match=r"unembed has shape \(4, 5\); expected \(5, 4\)"):
        FWLBlock(SIZE, V, unembed=nn.Parameter(torch.zeros(SIZE, V)))
    with pytest.raises(FastWeightError, match="inputs is not known yet; expected FWLBlock"):
        FWLBlock(SIZE, V).init_state(2)
    for bad in (dict(hidden=0), dict(inputs=-1), dict(refresh=True), dict(step_size=float("nan")), dict(eps=-1.0)):
        with pytest.raises(FastWeightError, match=f"{next(iter(bad))} is {next(iter(bad.values()))}; expected"):
            FWLBlock(SIZE, V, **bad)


def test_initial_weights_can_be_drawn_anew():
    """On the meta device construction is free; filled and reset, every weight is what it is meant to be."""
    embedding = torch.nn.Embedding(7, 4)
    block = FWLBlock(4, 7, inputs=3, step_size=0.5, log_steps=True, unembed=embedding.weight, device="meta")
    assert block.dense1.is_meta
    assert block.unembed is embedding.weight
    block = FWLBlock(16, 50, inputs=8, step_size=0.5, device="meta").to_empty(device="cpu")
    for p in block.parameters():
        p.data.fill_(float("nan"))
    block.reset_parameters()
    for name, (mean, std) in dict(
        dense1=(0, 8**-0.5), dense2=(0, 64**-0.5), unembed=(0, 16**-0.5), scale=(1, 0), steps=(0.5, 0), bias1=(0, 0),
        bias2=(0, 0), shift=(0, 0), unembed_bias=(0, 0),
    ).items():  # fmt: skip
        p = getattr(block, name).detach()
        assert abs(p.mean() - mean) <= std / 3, name
        assert abs(p.std() - std) <= std / 5, name
