"""Transforms of torch.func and derivatives of derivatives, of memories, layers and Fast Weight Layers."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap

from fastweights import FastWeightError
from fastweights.torch import FastWeightAttention, FWLBlock, cross_entropy, fast_weight, make_labels

LAYERS = [dict(), dict(refresh=3), dict(refresh=3, within="cumulative"), dict(refresh=4, decay=0.9, clip=0.05)]
V, D = 7, 5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def agree(function, *inputs):
    """Forward mode is reverse mode transposed: u . (J t) is (J^T u) . t for any u and t."""
    tangents = [torch.randn_like(x) for x in inputs]
    y, along = jvp(function, inputs, tuple(tangents))
    _, back = vjp(function, *inputs)
    u = torch.randn_like(y)
    want = sum((g * t).sum() for g, t in zip(back(u), tangents, strict=True))
    torch.testing.assert_close((u * along).sum(), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
@pytest.mark.parametrize("how", [dict(), dict(features="silu", norm="l2"), dict(read="before", writes=2)])
def test_forward_mode_of_a_memory(method, how):
    T, n = 9, 9 * how.get("writes", 1)
    inputs = [draw(2, T, 2, 4), draw(2, n, 2, 4), draw(2, n, 2, 3), draw(2, n, 2).sigmoid(), -draw(2, T, 2, 4).exp(),
              draw(2, n, 2, 4), draw(2, 2, 4, 3)]  # fmt: skip

    def run(q, k, v, beta, log_decay, erase, state):
        o, S = fast_weight(0.5 * q, 0.5 * k, v, beta=beta, log_decay=log_decay, erase=0.5 * erase, state=state,
                           method=method, chunk_size=4, **how)  # fmt: skip
        return torch.cat([o.flatten(), S.flatten()])

    agree(run, *inputs)


@pytest.mark.parametrize("preset", ["delta-network", "gated-deltanet", "kda"])
def test_forward_mode_of_a_layer(preset):
    layer = FastWeightAttention.preset(preset, 8, 2, dtype=torch.float64)
    agree(lambda x: layer(x)[0], draw(2, 11, 8))
    agree(lambda x: layer(x, cu_seqlens=torch.tensor([0, 4, 4, 11]))[0], draw(1, 11, 8))


def test_dual_numbers_and_hessian():
    q, k, v = draw(1, 5, 1, 2), draw(1, 5, 1, 2), draw(1, 5, 1, 2)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(fast_weight(q, k, forward_ad.make_dual(v, v))[0])
    torch.testing.assert_close(got.tangent, got.primal)  # o is linear in v
    mixer, x, t = FastWeightAttention.preset("gated-deltanet", 8, 2, dtype=torch.float64), draw(1, 9, 8), draw(1, 9, 8)
    block, labels = layer(refresh=3), (torch.arange(9)[None] % V, torch.ones(1, 9))
    for f in (lambda x: mixer(x)[0], lambda x: block(x[..., :D], *labels)):
        with torch.no_grad(), forward_ad.dual_level():
            got = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
        torch.testing.assert_close(got, jvp(f, (x,), (t,))[1], rtol=1e-9, atol=1e-9)
    loss = lambda k: fast_weight(q, k, v)[0].sin().sum()  # noqa: E731
    torch.testing.assert_close(hessian(loss)(k), jacrev(grad(loss))(k))


def layer(**how):
    return FWLBlock(6, V, inputs=D, normalizer=4.0, step_size=0.4, dtype=torch.float64, **how)


def texts(n, T=8):
    """x (n, 2, T, D), labels and weights (n, 2, T); the second row of each is padded."""
    tokens = torch.randint(1, V, (n, 2, T))
    tokens[:, 1, T - 2 :] = 0
    labels, weights = zip(*(make_labels(t, 0, dtype=torch.float64) for t in tokens), strict=True)
    return draw(n, 2, T, D), torch.stack(labels), torch.stack(weights)


@pytest.mark.parametrize("how", LAYERS)
def test_fast_weight_layers_are_mapped(how):
    """Over texts, with gradients of each text, and over layers."""
    block, given = layer(**how), texts(3)
    apart = lambda f: torch.stack([f(*(y[i] for y in given)) for i in range(3)])  # noqa: E731
    for f in (block, block.loss, lambda *text: block.run(*text).state[1]):
        torch.testing.assert_close(vmap(f)(*given), apart(f), rtol=1e-9, atol=1e-11)
    parameters = dict(block.named_parameters())
    loss = lambda p, *text: functional_call(block, p, text).square().sum()  # noqa: E731
    got = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, *given)
    for name, p in parameters.items():
        want = apart(lambda *text: torch.autograd.grad(loss(parameters, *text), p)[0])  # noqa: B023
        torch.testing.assert_close(got[name], want, rtol=1e-9, atol=1e-9)
    blocks = [layer(**how) for _ in range(3)]
    got = vmap(lambda p, *text: functional_call(block, p, text))(stack_module_state(blocks)[0], *given)
    want = torch.stack([block(*(y[i] for y in given)) for i, block in enumerate(blocks)])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", LAYERS)
def test_fast_weight_layers_have_derivatives_of_derivatives(how):
    """Of the gradient by hand of their output, which saved tensors go into: a penalty on a gradient must see them."""
    block = layer(**how)
    x, labels, weights = (y[0, :, :6] for y in texts(1))

    def logits(*values):
        return functional_call(
            block, dict(zip(("steps", "dense2", "unembed"), values, strict=True)), (x, labels, weights)
        )

    values = [p.detach().requires_grad_() for p in (block.steps, block.dense2, block.unembed)]
    torch.autograd.gradgradcheck(logits, values, fast_mode=True)
    agree(logits, *(p.detach() for p in values))
    block.unembed.requires_grad_(False)  # one that is not asked for
    (g,) = torch.autograd.grad(block.run(x, labels, weights).loss.sum(), block.steps, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), block.steps)[0].abs().max() > 0


def test_second_derivatives_of_a_loss_and_of_its_gradient():
    """Both results of the output layer at once; the first derivatives are the same when they are to be taken again."""
    given = [draw(5, 4).requires_grad_(), draw(4, V).requires_grad_(), draw(V).requires_grad_()]
    both = lambda *given: cross_entropy.head(*given, torch.arange(5) % V)  # noqa: E731
    assert torch.autograd.gradgradcheck(both, given)
    first = [
        torch.autograd.grad(sum(y.sin().sum() for y in both(*given)), given, create_graph=g) for g in (False, True)
    ]
    torch.testing.assert_close(*first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", LAYERS[:2])
def test_losses_with_one_derivative_say_so(how):
    block, (x, labels, weights) = layer(**how), (y[0] for y in texts(1))
    loss = block.loss(x, labels, weights)
    with pytest.raises(FastWeightError, match=r"create_graph is True; expected False.*`FWLBlock\.run"):
        torch.autograd.grad(loss, block.steps, create_graph=True)


def test_what_cannot_be_mapped_says_why():
    block, given = layer(refresh=3), texts(2)
    states = vmap(lambda *text: block.run(*text).state)(*given)
    with pytest.raises(FastWeightError, match=r"state\.waiting is mapped by vmap; expected one for all"):
        vmap(lambda x, labels, weights, *state: block.run(x, labels, weights, type(states)(*state)).logits)(
            *given, *states
        )
    row = [y[:, :1] for y in given]
    with pytest.raises(FastWeightError, match="cu_seqlens is mapped by vmap; expected one"):
        vmap(lambda *a: block.run(*a[:3], cu_seqlens=a[3]).logits)(*row, torch.tensor([[0, 8], [0, 8]]))
    with pytest.raises(FastWeightError, match=r"inputs is not known yet; expected FWLBlock\(\.\.\., inputs=D\)"):
        vmap(FWLBlock(6, V, dtype=torch.float64))(*given)
