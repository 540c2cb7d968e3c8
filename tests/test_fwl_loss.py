"""The hand-written loss of a Fast Weight Layer: the oracle's loss, exact gradients (kernels: test_kernels_fwl.py)."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from fwl_oracle import SIZE, B, D, T, V, double, make, oracle, problem, steps_of  # noqa: F401
from oracle import assert_close
from torch import nn

from fastweights import FastWeightError, fwl
from fastweights.torch import FWLBlock, cross_entropy
from fastweights.torch.framework import OPS
from fastweights.torch.learning import published_loss

FORMS = [
    dict(),
    dict(fast_bias=False, shared_norm_step=True, normalizer="sequence"),
    dict(normalizer=5.0, hidden=6, bias=False, attn_chunks=None),
    dict(first_order=True, attn_chunks=1, log_steps=True),
    dict(decay=0.7, attn_chunks=3),
]


def general(block, x, labels, weights, **how):
    """The loss through fwl.py and autograd."""
    out = block.run(x, labels, weights, logits=False, **how)
    return (out.loss * weights).sum() / weights.sum()


@pytest.mark.parametrize("normalizer", ["batch", "sequence", 7.0])
def test_is_the_loss_of_the_brute_force_logits(normalizer):
    block = make(normalizer=normalizer)
    x, labels, weights = problem()
    per_row = {"batch": weights.sum().expand(B), "sequence": weights.sum(1)}.get(normalizer, torch.full((B,), 7.0))
    logits = oracle(block, x, labels, weights, per_row, steps_of(block))
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(B, T)
    want = (losses * weights).sum() / weights.sum()
    assert_close(block.loss(x, labels, weights).detach().numpy(), want.numpy())


@pytest.mark.parametrize("how", FORMS[:3], ids=str)
@pytest.mark.parametrize("attn_chunks", [1, 2])
def test_gradients_are_exact_to_second_order(how, attn_chunks):
    block = make(**how | dict(attn_chunks=attn_chunks))
    x, labels, weights = problem(1, 18)
    names = [n for n, _ in block.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in block.parameters()]

    def run(x, *p):
        parameters = dict(unembed_bias=torch.zeros(V)) | dict(zip(names, p, strict=True))
        share = weights / fwl.normalization(block.config, OPS, weights, None)
        return published_loss.loss(block.config, parameters, x, labels, weights, share)

    torch.autograd.gradcheck(run, [x.requires_grad_(), *values])


@pytest.mark.parametrize(("how", "length"), list(product(FORMS, [1, T, 21])), ids=str)
def test_is_the_general_path(how, length):
    """Value and gradients of x and of every parameter, whatever the number of chunks and the length."""
    block = make(**how)
    x, labels, weights = problem(B, max(length, 3))
    x, labels, weights = x[:, :length].requires_grad_(), labels[:, :length], weights[:, :length] + 0.1
    of = [x, *block.parameters()]
    got, want = (f(x, labels, weights) for f in (block.loss, lambda *a: general(block, *a)))
    assert_close(got.detach().numpy(), want.detach().numpy())
    got, want = (torch.autograd.grad(y, of, allow_unused=True) for y in (got, want))
    for (name, _), a, b in zip([("x", x), *block.named_parameters()], got, want, strict=True):
        b = torch.zeros_like(a) if b is None else b
        assert_close(a.numpy(), b.numpy(), name=name)


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize(
    "how", [dict(), dict(decay=0.7, normalizer="sequence"), dict(decay=0.9, normalizer=5.0)], ids=str
)
def test_packed_documents_are_those_of_the_general_path(how, chunks):
    """Documents within a chunk, over several, of one token and of none; value and all gradients."""
    block = make(**how | dict(attn_chunks=chunks))
    x, labels, weights = problem(1, 23)
    cu = torch.tensor([0, 4, 5, 5, 17, 23])
    of = [x.requires_grad_(), *block.parameters()]
    got, want = block.loss(x, labels, weights, cu_seqlens=cu), general(block, x, labels, weights, cu_seqlens=cu)
    assert_close(got.detach().numpy(), want.detach().numpy())
    assert abs(got.item() - block.loss(x, labels, weights).item()) > 1e-6  # one document would be another loss
    got, want = (torch.autograd.grad(y, of, allow_unused=True, materialize_grads=True) for y in (got, want))
    for (name, _), a, b in zip([("x", x), *block.named_parameters()], got, want, strict=True):
        assert_close(a.numpy(), b.numpy(), name=name)


def test_offsets_that_do_not_cut_the_row_are_refused():
    x, labels, weights = problem(2, 6)
    with pytest.raises(FastWeightError, match="x has batch 2 with cu_seqlens; expected 1"):
        make().loss(x, labels, weights, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(FastWeightError, match="cu_seqlens ends at 5; expected T = 6"):
        make().loss(x[:1], labels[:1], weights[:1], cu_seqlens=torch.tensor([0, 5]))


def test_general_path_is_taken_where_the_other_does_not_go(monkeypatch):
    """And the hand-written one where it does: no option is silently left out."""
    monkeypatch.setattr(published_loss, "loss", lambda *a: torch.zeros(()))
    x, labels, weights = problem()
    for how in (dict(clip=0.1), dict(rule="delta"), dict(refresh=4)):
        assert make(**how).loss(x, labels, weights) != 0
    assert make().loss(x, labels, weights.requires_grad_()) != 0
    assert make().loss(x[:1], labels[:1], weights[:1].detach(), cu_seqlens=torch.tensor([0, 4, T])) == 0
    assert make(decay=0.9).loss(x, labels, weights.detach()) == 0


def test_backward_twice_and_without_gradients():
    block = make()
    x, labels, weights = problem()
    loss = block.loss(x, labels, weights)
    one, two = (torch.autograd.grad(loss * s, list(block.parameters()), retain_graph=True) for s in (1.0, 2.0))
    for a, b in zip(one, two, strict=True):
        assert_close(2 * a.numpy(), b.numpy())
    with torch.no_grad():
        assert_close(block.loss(x, labels, weights).numpy(), loss.detach().numpy())


def test_tied_unembedding_has_the_same_gradient():
    torch.manual_seed(1)
    embedding = nn.Embedding(V, SIZE)
    block = FWLBlock(SIZE, V, inputs=D, unembed=embedding.weight, step_size=0.5)
    x, labels, weights = problem()
    got, want = (torch.autograd.grad(f(x, labels, weights), embedding.weight)[0]
                 for f in (block.loss, lambda *a: general(block, *a)))  # fmt: skip
    assert_close(got.numpy(), want.numpy())


def test_loss_without_logits_has_the_same_gradients(monkeypatch):
    """Also when the vocabulary is cut into blocks of one or two words."""
    x, labels, weights = problem()
    block = make()
    out = block.run(x, labels, weights)
    want = torch.autograd.grad((out.loss * weights).sum() / weights.sum(), list(block.parameters()))
    for words in (1, 2, V):
        monkeypatch.setitem(cross_entropy.BLOCK, "cpu", words * B * T)
        got = torch.autograd.grad(block.loss(x, labels, weights), list(block.parameters()))
        for a, b in zip(got, want, strict=True):
            assert_close(a.numpy(), b.numpy())


@pytest.mark.parametrize("words", [2, V])
def test_a_weighted_sum_has_the_gradients_of_its_losses(monkeypatch, words):
    """Made with the value, a block of tokens at a time."""
    monkeypatch.setitem(cross_entropy.BLOCK, "cpu", words * V)
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((B, T, SIZE), (SIZE, V), (V,))]
    labels, weights = torch.randint(V, (B, T)), torch.rand(B, T, dtype=torch.float64)
    n, E, c = leaves
    plain = (
        nn.functional.cross_entropy((n @ E + c).flatten(0, 1), labels.flatten(), reduction="none") * weights.flatten()
    )
    got, want = (
        (value, *torch.autograd.grad(3 * value, leaves))
        for value in (cross_entropy.summed(*leaves, labels, weights), plain.sum())
    )
    for a, b in zip(got, want, strict=True):
        assert_close(a.detach().numpy(), b.detach().numpy())


def test_loss_never_holds_the_logits(monkeypatch):
    """With 50 blocks no tensor as large as a tenth of the logits is made, forwards or backwards."""
    from torch.utils._python_dispatch import TorchDispatchMode

    vocabulary, tokens = 5000, 64
    monkeypatch.setitem(cross_entropy.BLOCK, "cpu", tokens * 100)
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


def test_the_compiler_can_follow_the_choice_of_kernels():
    """On a GPU too, whether kernels are there is not asked while compiling: the question cannot be traced."""
    torch.compiler.reset()
    elsewhere = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    compiled = torch.compile(lambda x: x + cross_entropy.on_gpu(elsewhere), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 0
