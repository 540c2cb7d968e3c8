"""Fast Weight Layers in PyTorch against the brute-force oracle: a slow forward with explicitly updated parameters."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from oracle import assert_close
from safetensors.torch import load_file, save_file
from torch import nn

from fastweights import FastWeightError
from fastweights.fwl import STEPS, FWLState
from fastweights.torch import DynamicEvaluation, FWLBlock, head, make_labels

B, T, D, SIZE, V = 2, 9, 3, 4, 5
FAST = STEPS  # parameter tensors that adapt, in the order of `steps`


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def problem(B=B, T=T):
    tokens = torch.randint(V, (B, T))
    labels, weights = make_labels(tokens)
    weights[0, 2] = 0.5  # weights need not be 0 or 1
    return torch.randn(B, T, D), labels, weights


def make(**how):
    block = FWLBlock(SIZE, V, how.pop("attn_chunks", 2), inputs=D, step_size=0.5, **how)
    with torch.no_grad():  # every step its own
        block.steps.mul_(torch.linspace(0.6, 1.4, len(STEPS)))
        block.bias1.normal_()
        block.bias2.normal_()
        block.shift.normal_()
    return block


def slow_forward(block, p, x):
    h = torch.relu(x @ p["dense1"] + p["bias1"]) ** 2 @ p["dense2"] + p["bias2"]
    n = nn.functional.layer_norm(h, (SIZE,), p["scale"], p["shift"], block.config.eps)
    return n @ block.unembed + block.unembed_bias


def oracle(block, x, labels, weights, normalizer, steps):
    """Logits of token t: the slow forward with parameters minus steps times gradients of the losses before t."""
    out = torch.empty(*x.shape[:2], V)
    for i in range(x.shape[0]):
        p = {n: getattr(block, n).detach().requires_grad_() for n in FAST}
        losses = nn.functional.cross_entropy(slow_forward(block, p, x[i]), labels[i], reduction="none")
        for t in range(x.shape[1]):
            total = (losses[:t] * weights[i, :t]).sum() / normalizer[i]
            grads = torch.autograd.grad(total, list(p.values()), retain_graph=True, allow_unused=True)
            now = {n: q if g is None else q - steps[n] * g for (n, q), g in zip(p.items(), grads, strict=True)}
            out[i, t] = slow_forward(block, now, x[i, t : t + 1])[0]
    return out.detach()


def steps_of(block):
    steps = dict(zip(FAST, block.steps.detach(), strict=True))
    if not block.config.fast_bias:
        steps |= dict(bias1=torch.zeros(()), bias2=torch.zeros(()))
    if block.config.shared_norm_step:
        steps["shift"] = steps["scale"]
    return steps


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


def test_loss_without_logits_has_the_same_gradients(monkeypatch):
    """Also when the vocabulary is cut into blocks of one or two words."""
    x, labels, weights = problem()
    block = make()
    out = block.run(x, labels, weights)
    want = torch.autograd.grad((out.loss * weights).sum() / weights.sum(), list(block.parameters()))
    for words in (1, 2, V):
        monkeypatch.setattr(head, "BLOCK", words * B * T)
        got = torch.autograd.grad(block.loss(x, labels, weights), list(block.parameters()))
        for a, b in zip(got, want, strict=True):
            assert_close(a.numpy(), b.numpy())


def test_loss_never_holds_the_logits(monkeypatch):
    """With 50 blocks no tensor as large as a tenth of the logits is made, forwards or backwards."""
    from torch.utils._python_dispatch import TorchDispatchMode

    vocabulary, tokens = 5000, 64
    monkeypatch.setattr(head, "BLOCK", tokens * 100)
    block = FWLBlock(4, vocabulary, inputs=D)
    x, labels = torch.randn(1, tokens, D), torch.randint(vocabulary, (1, tokens))
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor):
                    largest[0] = max(largest[0], t.numel())
            return out

    with Watch():
        block.loss(x, labels, torch.ones(1, tokens)).backward()
    assert largest[0] <= tokens * vocabulary / 10
    assert largest[0] >= 4 * vocabulary  # the gradient of the embedding: the watch sees tensors


STREAMING = [dict(), dict(decay=0.9), dict(rule="delta"), dict(decay=0.8, clip=0.1, rule="delta")]


@pytest.mark.parametrize("how", STREAMING, ids=str)
def test_token_by_token_equals_the_parallel_pass(how):
    block = make(normalizer=6.0, **how)
    x, labels, weights = problem()
    weights = (weights > 0).double()
    want = block.run(x, labels, weights)
    state, logits = block.init_state(B), []
    for t in range(T):
        y, state = block.step(x[:, t], labels[:, t - 1] if t else None, state)
        logits.append(y)
    assert_close(torch.stack(logits, 1).detach().numpy(), want.logits.detach().numpy())
    for name, a, b in zip(FWLState._fields, state, want.state, strict=True):
        assert_close(a.detach().numpy(), b.detach().numpy(), name=name)


@pytest.mark.parametrize("how", STREAMING, ids=str)
def test_states_go_on_fork_and_resume(how, tmp_path):
    """Prefill five tokens in parallel, save the state, then stream the rest from two copies of it."""
    block = make(normalizer=6.0, **how)
    x, labels, _ = problem()
    whole = block.run(x, labels, torch.cat([torch.ones(B, T - 1), torch.zeros(B, 1)], 1)).logits
    known = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]).expand(B, 5)  # the label of the fifth is not known yet
    state = block.run(x[:, :5], labels[:, :5], known).state
    save_file({n: t.detach().contiguous() for n, t in state._asdict().items()}, tmp_path / "state.safetensors")
    for copy in (state, FWLState(**load_file(tmp_path / "state.safetensors"))):
        fork = copy
        for t in range(5, T):
            y, fork = block.step(x[:, t], labels[:, t - 1], fork)
            assert_close(y.detach().numpy(), whole[:, t].detach().numpy())
    rest = block.run(x[:, 5:], labels[:, 5:], torch.ones(B, T - 5),
                     state=block.run(x[:, :5], labels[:, :5], torch.ones(B, 5)).state)  # fmt: skip
    assert_close(rest.logits.detach().numpy(), whole[:, 5:].detach().numpy())


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


def documents(n, length=96, words=8, vocabulary=32, seed=0):
    """Each document has its own few words and its own order of them: after a word always comes the same next one."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        cycle = torch.randperm(vocabulary, generator=generator)[:words]
        jump = torch.rand(length, generator=generator) < 0.1
        where, row = 0, []
        for t in range(length):
            where = int(torch.randint(words, (), generator=generator)) if jump[t] else (where + 1) % words
            row.append(cycle[where])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def test_documents_with_their_own_vocabulary_are_learned_while_reading():
    """A body that sees one token cannot know the document; fast weights and dynamic evaluation learn it."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    body, block = nn.Embedding(32, 32), FWLBlock(32, 32, inputs=32, normalizer=1.0, step_size=0.1)
    optimizer = torch.optim.Adam([*body.parameters(), *block.parameters()], lr=3e-3)
    train = documents(512)
    for step in range(150):
        tokens = train[torch.randint(512, (16,), generator=torch.Generator().manual_seed(step))]
        labels, weights = make_labels(tokens)
        out = block.run(body(tokens), labels, weights)
        loss = ((out.loss + out.slow_loss) * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = documents(8, seed=1)
    labels, weights = make_labels(held_out)
    with torch.no_grad():
        out = block.run(body(held_out), labels, weights)
        fast, static = ((x * weights).sum() / weights.sum() for x in (out.loss, out.slow_loss))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.block = body, block

        def forward(self, tokens):
            return self.block.slow_logits(self.body(tokens))

    dynamic = []
    with DynamicEvaluation(Model(), lr=0.3, segment=4) as evaluation:
        for row in held_out:
            evaluation.reset()
            dynamic.append(evaluation.run(row[None]).mean)
    dynamic = sum(dynamic) / len(dynamic)
    assert static > 3.0  # a little under log 32 = 3.47
    assert dynamic < static - 1.5, (float(static), dynamic)
    assert fast < static - 2.0, (float(static), float(fast))


def test_kernels_of_the_head_match_its_plain_form():
    """Under Triton's interpreter, in a process of its own: it must be chosen before Triton is imported."""
    pytest.importorskip("triton")
    code = """
import torch
from fastweights.torch import head
torch.manual_seed(0)
n, E, c = (torch.randn(s, requires_grad=True) for s in ((13, 8), (8, 3001), (3001,)))
y = torch.randint(3001, (13,))
head.BLOCK = 13 * 1500  # three blocks, the last one of a single word
def run():
    loss, r = head.head(n, E, c, y)
    both = torch.autograd.grad((loss * torch.arange(13)).sum() + r.sin().sum(), (n, E, c))
    return loss, r, *both, *torch.autograd.grad(head.loss(n, E, c, y).sum(), (n, E, c))
plain = run()
used = []
head._on_gpu = lambda z: used.append(1) or True
for a, b in zip(run(), plain, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
assert len(used) == 12
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
