"""The elementwise functions with gradients by hand, against their plain compositions in float64."""

import pytest
import torch

from fastweights.models.blocks import swiglu
from fastweights.torch import hand_gradients


def plain_depthwise(x, weight):
    T = x.shape[1] - len(weight) + 1
    return sum(weight[j] * x[:, j : j + T] for j in range(len(weight)))


def plain_unit(x):
    return x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt()


def plain_packed(x, weight, before, lengths):
    """Sequences one after the other."""
    parts = zip(before, x[0].split(lengths), strict=True)
    return torch.cat([plain_depthwise(torch.cat([b, y])[None], weight) for b, y in parts], 1)


def packed(*lengths):
    """A case of packed sequences: outputs and the last inputs of each."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    last = lambda x, before: [torch.cat([b, y])[-3:] for b, y in zip(before, x[0].split(lengths), strict=True)]  # noqa: E731
    return (
        lambda x, weight, before: torch.cat([y.flatten() for y in hand_gradients.convolve(x, weight, before, offsets)]),
        lambda x, weight, before: torch.cat(
            [plain_packed(x, weight, before, lengths).flatten(), torch.stack(last(x, before)).flatten()]
        ),
        [(1, 6, 2), (4, 2), (len(lengths), 3, 2)],
    )


CASES = {
    "packed": packed(3, 0, 1, 2),
    "packed, of one length": packed(3, 3, 0),
    "depthwise": (hand_gradients.depthwise, plain_depthwise, [(2, 9, 3), (4, 3)]),
    "unit": (lambda x: hand_gradients.unit(x, 1e-6), plain_unit, [(2, 5, 4)]),
    "scaled unit": (lambda x: hand_gradients.unit(x, 1e-6, 0.5), lambda x: plain_unit(x) / 2, [(2, 5, 4)]),
    "norm": (
        lambda x, weight: hand_gradients.rms_norm(x, weight, 1e-6),
        lambda x, weight: 2 * plain_unit(x / 2) * weight,  # 4 wide, eps 4e-6 / 4
        [(2, 5, 4), (4,)],
    ),
    "SwiGLU": (swiglu, lambda x: torch.nn.functional.silu(x[..., :3]) * x[..., 3:], [(2, 5, 6)]),
    "gated norm": (
        lambda x, gate, weight: hand_gradients.GatedNorm.apply(x, gate, weight, 1e-6, "silu")[0],
        lambda x, gate, weight: 2 * plain_unit(x / 2) * weight * torch.nn.functional.silu(gate),  # 4 wide, eps 4e-6 / 4
        [(5, 4), (5, 4), (4,)],
    ),
    "norm with a sigmoid": (
        lambda x, gate, weight: hand_gradients.gated_norm(x, gate, weight, 1e-6, "sigmoid"),
        lambda x, gate, weight: 2 * plain_unit(x / 2) * weight * gate.sigmoid(),
        [(5, 4), (5, 4), (4,)],
    ),
    "norm with a sigmoid, in cache": (
        lambda x, gate, weight: hand_gradients.GatedNorm.apply(x, gate, weight, 1e-6, "sigmoid")[0],
        lambda x, gate, weight: 2 * plain_unit(x / 2) * weight * gate.sigmoid(),
        [(5, 4), (5, 4), (4,)],
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    function, plain, shapes = CASES[request.param]
    return function, plain, [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_equal_their_plain_form(case):
    function, plain, inputs = case
    torch.testing.assert_close(function(*inputs), plain(*inputs), rtol=1e-12, atol=1e-12)


def test_first_and_second_derivatives(case):
    function, _, inputs = case
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("need", [(1, 1, 0), (0, 1, 1), (1, 0, 0), (0, 0, 1)])
def test_second_derivatives_beside_what_is_frozen(need):
    """As with adapters, whose layers around them have no gradients. Rows enough for the form by hand."""
    given = [
        torch.randn(*shape).double().requires_grad_(bool(n))
        for shape, n in zip(((600, 32), (600, 32), (32,)), need, strict=True)
    ]
    leaves = [x for x in given if x.requires_grad]

    def twice(f):
        first = torch.autograd.grad(f(*given, 1e-5, "silu").sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    torch.testing.assert_close(twice(hand_gradients.gated_norm), twice(hand_gradients._gated_norm))


def test_vmap_of_the_gradient(case, request):
    kinds = ("gated norm", "norm with a sigmoid, in cache", "packed", "packed, of one length")
    if request.node.callspec.params["case"] in kinds:
        pytest.skip("transforms get the plain form")
    function, plain, inputs = case
    stacked = torch.stack([inputs[0].detach(), 2 * inputs[0].detach()])

    def gradient(f):
        return torch.func.vmap(torch.func.grad(lambda x: (f(x, *inputs[1:]) ** 2).sum()))(stacked)

    torch.testing.assert_close(gradient(function), gradient(plain), rtol=1e-10, atol=1e-10)


def test_what_is_done_piece_by_piece_in_cache_is_the_whole(monkeypatch):
    monkeypatch.setattr(hand_gradients, "_tokens_in_cache", lambda x: [(0, 3), (3, 8), (8, x.shape[1])])
    monkeypatch.setattr(hand_gradients, "_in_cache", lambda x: [slice(0, 2), slice(2, 5)])
    for name in ("depthwise", "gated norm"):
        function, plain, shapes = CASES[name]
        shapes = [(2, 15, 3), *shapes[1:]] if name == "depthwise" else shapes
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        got, want = (torch.autograd.grad(f(*inputs).sin().sum(), inputs) for f in (function, plain))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_convolution_promotes_as_a_product_does():
    x, weight = torch.randn(1, 6, 2, dtype=torch.bfloat16), torch.randn(3, 2)
    assert hand_gradients.depthwise(x, weight).dtype == (x * weight[0]).dtype == torch.float32


def test_gradients_of_a_convolution_are_wide_under_autocast():
    """Products of bfloat16 would err by 1e-2."""
    x, weight = torch.randn(2, 40, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    want = torch.autograd.grad(plain_depthwise(x, weight).sin().sum(), [x, weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(hand_gradients.depthwise(x, weight).sin().sum(), [x, weight])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["packed", "packed, of one length"])
def test_a_compiled_convolution_is_the_eager_one_to_the_last_bit(name):
    function, _, shapes = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    (got, dgot), (want, dwant) = (
        (y.detach(), torch.autograd.grad(y.sin().sum(), inputs)) for y in (compiled(*inputs), function(*inputs))
    )
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(dgot, dwant, strict=True))
