"""What PyTorch users do with `fast_weight` beyond calling it: derivatives, dtypes, transforms, compilation, streams."""

import itertools
import resource

import numpy as np
import pytest
import torch
from oracle import assert_close, oracle, problem, torch_loop
from torch.utils.checkpoint import checkpoint

from fastweights import FastWeightError
from fastweights.core import Inputs, Spec
from fastweights.torch import chunked, fast_weight, methods, packing
from fastweights.torch.triangular import inverse

NAMES = ("q", "k", "v", "beta", "log_decay", "state")
ALL = tuple(range(len(NAMES)))


def tensors(rng, dtype=torch.float64, grad=False, **shape):
    args = problem(rng, **shape)
    return [torch.tensor(args[n], dtype=dtype).requires_grad_(grad) for n in NAMES]


def named(inputs):
    return Inputs(**dict(zip(NAMES, inputs, strict=True)))


def call(*inputs, **how):
    how = {"method": "chunked", "chunk_size": 8} | how
    return fast_weight(**dict(zip(NAMES, inputs, strict=True)), **how)


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory is NaN, so that an element left unwritten cannot pass."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def poisoned(*args, _make=make, **how):
            x = _make(*args, **how)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        monkeypatch.setattr(owner, name, poisoned)


@pytest.mark.parametrize(
    ("rule", "read", "H"), [("delta", "after", 2), ("delta", "before", 1), ("sum", "after", 1), ("sum", "before", 1)]
)
def test_first_and_second_derivatives(rng, rule, read, H):
    inputs = tensors(rng, grad=True, B=1, T=6, H=H, K=2, V=2)
    run = lambda *x: call(*x, rule=rule, read=read, chunk_size=4)  # noqa: E731
    torch.autograd.gradcheck(run, inputs)
    torch.autograd.gradgradcheck(run, inputs)


def test_derivatives_of_packed_sequences(rng):
    inputs = tensors(rng, grad=True, B=1, T=6, H=1, K=2, V=2, sequences=3)
    run = lambda *x: call(*x, cu_seqlens=torch.tensor([0, 5, 5, 6]), chunk_size=4)  # noqa: E731
    torch.autograd.gradcheck(run, inputs)
    torch.autograd.gradgradcheck(run, inputs)


def test_derivatives_of_a_padded_batch(rng):
    inputs = tensors(rng, grad=True, B=2, T=5, H=1, K=2, V=2)
    mask = torch.tensor([[True] * 3 + [False] * 2, [False] + [True] * 4])
    torch.autograd.gradcheck(lambda *x: call(*x, mask=mask), inputs)


def test_third_derivative_is_right(rng):
    """d^3/dx^3 of a sum of outputs along one direction, against the recurrent form."""
    inputs = tensors(rng, B=1, T=6, H=1, K=2, V=2)
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def third(method):
        y = call(*(x.exp() * t for t in inputs[:4]), *inputs[4:], method=method, chunk_size=4)[0].sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
        return y

    torch.testing.assert_close(third("chunked"), third("recurrent"), rtol=1e-9, atol=1e-9)


def test_gradients_of_the_inputs_that_ask(rng):
    inputs = tensors(rng)
    full = [x.clone().requires_grad_() for x in inputs]
    want = torch.autograd.grad(call(*full)[0].sum(), full)
    for i, x in enumerate(inputs):
        alone = [y.clone().requires_grad_(i == j) for j, y in enumerate(inputs)]
        torch.testing.assert_close(torch.autograd.grad(call(*alone)[0].sum(), alone[i])[0], want[i], msg=NAMES[i])
        assert x.grad is None


def test_every_element_is_written(rng, poison):
    for how in (dict(B=2, T=37), dict(B=1, T=37, sequences=3)):
        inputs = tensors(rng, grad=True, **how)
        packed = {"cu_seqlens": torch.tensor([0, 20, 20, 37])} if "sequences" in how else {}
        for rule in ("delta", "sum"):
            o, S = call(*inputs, rule=rule, **packed)
            for x in (o, S, *torch.autograd.grad((o.sum() + S.sum()), inputs)):
                assert x.isfinite().all()


def test_inputs_are_not_changed(rng):
    inputs = tensors(rng, grad=True)
    before = [x.detach().clone() for x in inputs]
    o, S = call(*inputs)
    torch.autograd.grad(o.sum() + S.sum(), inputs)
    for x, y in zip(inputs, before, strict=True):
        assert torch.equal(x.detach(), y)
    assert S.data_ptr() != inputs[-1].data_ptr()


def test_strided_and_expanded_inputs(rng):
    args = problem(rng, T=20)
    q, k, v, beta, log_decay, state = (torch.tensor(args[n]) for n in NAMES)
    qkv = torch.cat([q, k], -1)
    q, k = qkv[..., : q.shape[-1]], qkv[..., q.shape[-1] :]
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    beta = beta[:, :, :1].expand(*beta.shape)
    want = oracle(**(args | {"beta": beta.numpy()}))
    for got, exact in zip(call(q, k, v, beta, log_decay, state), want, strict=True):
        assert_close(got.numpy(), exact)


@pytest.mark.parametrize(("B", "T"), [(0, 5), (0, 1), (2, 0)])
@pytest.mark.parametrize("how", [dict(), dict(rule="sum"), dict(writes=2), dict(method="recurrent")])
def test_no_rows_and_no_tokens(how, B, T):
    """Nothing comes of nothing: empty outputs, and a memory that stays as it was, with gradients and without."""
    for grad in (False, True):
        W = how.get("writes", 1) * T
        q, k, v = (torch.randn(B, n, 2, 3, requires_grad=grad) for n in (T, W, W))
        state = torch.randn(B, 2, 3, 3, requires_grad=grad)
        o, S = fast_weight(q, k, v, beta=torch.rand(B, W, 2), state=state, **how)
        assert o.shape == (B, T, 2, 3)
        assert torch.equal(S, state)
        if grad:
            (o.sum() + S.sum()).backward()
            assert torch.equal(state.grad, torch.ones_like(state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_half_precision_errs_at_most_twice_as_much_as_plain_torch(rng, rule, dtype):
    """Plain torch: the equation in a loop, everything in that dtype."""
    inputs = [x.to(dtype) for x in tensors(rng, T=130, K=32, V=16)]
    state = inputs[-1].float()
    plain, _ = torch_loop(**dict(zip(NAMES, inputs, strict=True)), rule=rule)
    exact, _ = oracle(**{n: x.double().numpy() for n, x in zip(NAMES, inputs, strict=True)}, rule=rule)
    got, final = call(*inputs[:-1], state, rule=rule)
    assert got.dtype == dtype
    assert final.dtype == torch.float32
    error = np.abs(got.double().numpy() - exact).max()
    allowed = 2 * np.abs(plain.double().numpy() - exact).max()
    assert error <= allowed, f"max error {error:.2e} exceeds {allowed:.2e}, twice plain torch's"


def test_rates_may_be_wider_than_the_values(rng):
    q, k, v, beta, log_decay, state = tensors(rng, torch.float32, T=20)
    o, _ = call(q.bfloat16(), k.bfloat16(), v.bfloat16(), beta, log_decay, state)
    assert o.dtype == torch.bfloat16


def test_autocast_casts_values_and_accumulates_in_float32(rng):
    inputs = tensors(rng, torch.float32, grad=True, T=70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, S = call(*inputs)
        loop, S_loop = call(*inputs, method="recurrent")
    assert o.dtype == loop.dtype == torch.bfloat16
    assert S.dtype == S_loop.dtype == torch.float32
    torch.testing.assert_close(S, S_loop, rtol=1e-5, atol=1e-5)  # products in bfloat16 would differ by 1e-2
    for g, x in zip(torch.autograd.grad(o.float().sum(), inputs), inputs, strict=True):
        assert g.dtype == x.dtype


def test_compiles_without_a_graph_break(rng):
    for packed in (None, torch.tensor([0, 13, 20])):
        inputs = tensors(rng, grad=True, B=1, T=20, sequences=1 if packed is None else 2)
        compiled = torch.compile(lambda *x, cu=packed: call(*x, cu_seqlens=cu), fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(*inputs), call(*inputs, cu_seqlens=packed), strict=True):
            torch.testing.assert_close(got, want)
        with torch.no_grad():
            for got, want in zip(compiled(*inputs), call(*inputs, cu_seqlens=packed), strict=True):
                torch.testing.assert_close(got, want)
        got, want = (torch.autograd.grad(f(*inputs)[0].sum(), inputs)
                     for f in (compiled, lambda *x, cu=packed: call(*x, cu_seqlens=cu)))  # fmt: skip
        torch.testing.assert_close(got, want)


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of two steps of 8 tokens for the sizes of `problem`, so that short sequences have several."""
    monkeypatch.setattr(packing, "SEGMENT", 2 * packing.SEGMENT // packing.steps_in_cache(2, 3, 8, 8))


@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_saved_by_segments_or_in_one(rng, rule, small_segments, monkeypatch):
    """37 tokens in 5 steps, saved in 3 parts, against the loop and against one tensor for all."""
    inputs = tensors(rng, grad=True, B=2, T=37, H=3, K=8, V=4)
    assert chunked.layout(named(inputs), Spec(chunk_size=8)) == 2

    def results(**how):
        o, S = call(*inputs, rule=rule, **how)
        return o, S, *torch.autograd.grad(o.sin().sum() + S.sin().sum(), inputs)

    parts = results()
    torch.testing.assert_close(parts, results(method="recurrent"), rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(chunked, "METHOD", chunked.METHOD._replace(layout=lambda *_: chunked.ALL))
    for got, want in zip(parts, results(), strict=True):
        assert torch.equal(got, want)


def test_operators_pass_torchs_own_check(rng, small_segments):
    operators = methods.ADDED["chunked"]
    inputs = list(named(tensors(rng, B=2, T=37, H=3, K=8, V=4))[: methods.GIVEN])
    for rule, layout in itertools.product(("delta", "sum"), (chunked.ALL, 2)):
        spec = Spec(rule=rule, chunk_size=8).as_text()
        torch.library.opcheck(operators.forward, (inputs, spec, layout))
        o, S, *saved = operators.forward(inputs, spec, layout)
        assert len(saved) == (4 if rule == "delta" else 2) * (1 if layout == chunked.ALL else 3)
        torch.library.opcheck(operators.backward, (o, S, inputs, saved, spec))


def test_vmap_equals_a_loop(rng):
    many = [torch.stack([x, 0.5 * x, 0.1 * x]) for x in tensors(rng, T=20)]
    got = torch.func.vmap(call)(*many)
    want = [torch.stack(x) for x in zip(*(call(*(x[i] for x in many)) for i in range(3)), strict=True)]
    torch.testing.assert_close(list(got), want)
    shared = torch.func.vmap(call, in_dims=(0, None, 0, None, None, None))(many[0], many[1][0], many[2],
                                                                           *(x[0] for x in many[3:]))  # fmt: skip
    assert shared[0].shape == got[0].shape


def test_functional_gradients(rng):
    inputs = tensors(rng, T=20)
    loss = lambda *x: call(*x)[0].sin().sum() + call(*x)[1].sum()  # noqa: E731
    got = torch.func.grad(loss, argnums=ALL)(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.testing.assert_close(got, torch.autograd.grad(loss(*leaves), leaves))
    many = [torch.stack([x, 0.5 * x]) for x in inputs]
    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=ALL))(*many)
    torch.testing.assert_close([g[0] for g in per_sample], list(got))


def test_functional_second_derivatives(rng):
    """jacrev of grad is vmap of a gradient of a gradient: the same as autograd's own."""
    inputs = tensors(rng, B=1, T=5, H=1, K=2, V=2)
    loss = lambda k: call(inputs[0], k, *inputs[2:], chunk_size=2)[0].sin().sum()  # noqa: E731
    got = torch.func.jacrev(torch.func.grad(loss))(inputs[1])
    torch.testing.assert_close(got, torch.autograd.functional.hessian(loss, inputs[1]))


def test_gradient_checkpointing(rng):
    inputs = tensors(rng, grad=True, T=20)
    run = lambda *x: call(*x)[0].sin()  # noqa: E731
    got = torch.autograd.grad(checkpoint(run, *inputs, use_reentrant=False).sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(run(*inputs).sum(), inputs))


@pytest.mark.parametrize("C", [1, 2, 7, 8, 16, 50, 64, 128])
@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_inverse_when_keys_nearly_repeat(rng, C, strength):
    """As accurate as LAPACK's substitution, in float32, by a factor of 4, but for what two products per merge round.

    The terms of these products are about 1, and processors sum them in different orders.
    """
    k = 1 + 0.05 * rng.standard_normal((3, C, 16))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    L = torch.tensor(np.tril(strength * k @ k.swapaxes(1, 2), -1))
    eye = torch.eye(C, dtype=torch.float64).expand(3, C, C)
    exact = torch.linalg.solve_triangular(eye + L.float(), eye, upper=False)
    plain = torch.linalg.solve_triangular(eye.float() + L.float(), eye.float(), upper=False)
    merges = np.ceil(np.log2(max(C / 8, 1)))
    rounding = 2 * merges * torch.finfo(torch.float32).eps
    assert (inverse(L.float()) - exact).abs().max() <= 4 * (plain - exact).abs().max() + rounding
    assert_close(inverse(L.float().double()).numpy(), exact.numpy(), 1e-12)


def test_a_million_tokens_stream_in_constant_memory():
    pieces, T, H, D = 128, 8192, 1, 16
    generator = torch.Generator().manual_seed(0)
    state, peak = None, []
    with torch.no_grad():
        for piece in range(pieces):
            q, k, v = torch.randn(3, 1, T, H, D, generator=generator)
            k = torch.nn.functional.normalize(k, dim=-1)
            o, state = fast_weight(q, k, v, beta=torch.rand(1, T, H, generator=generator), state=state)
            assert o.shape == v.shape
            if piece in (8, pieces - 1):
                peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert state.isfinite().all()
    assert state.norm() < 100  # unit keys and rates in [0, 1]: the memory forgets as fast as it learns
    assert peak[1] - peak[0] < 20_000, f"grew by {peak[1] - peak[0]} KiB over a million tokens"


def test_two_devices_are_refused(rng):
    q, k, v, *_ = tensors(rng, T=3)
    with pytest.raises(FastWeightError, match="k is on meta; expected cpu: the device of q"):
        fast_weight(q, k.to("meta"), v)


def test_a_mapped_packing_is_refused(rng):
    q, k, v, *_ = (x[None] for x in tensors(rng, B=1, T=4))
    with pytest.raises(FastWeightError, match="cu_seqlens is mapped by vmap; expected one packing"):
        torch.func.vmap(lambda q, k, v, cu: fast_weight(q, k, v, cu_seqlens=cu))(q, k, v, torch.tensor([[0, 4]]))


def test_a_packing_is_worked_out_once_per_tensor_of_offsets(rng, monkeypatch):
    """The layers of a model share one; a tensor that changed, or another one, is looked at anew."""
    looked = []
    monkeypatch.setattr(packing, "check_offsets", lambda offsets, T: looked.append(offsets))
    inputs = tensors(rng, grad=True, B=1, T=20, sequences=2)
    offsets = torch.tensor([0, 13, 20])
    for _ in range(3):
        torch.autograd.grad(call(*inputs, cu_seqlens=offsets)[0].sum(), inputs)
    assert looked == [[0, 13, 20]]
    first = call(*inputs, cu_seqlens=offsets)[0]
    offsets[1] = 7
    second = call(*inputs, cu_seqlens=offsets)[0]
    assert looked[1:] == [[0, 7, 20]]
    assert not torch.equal(first, second)
    del offsets
    call(*inputs, cu_seqlens=torch.tensor([0, 9, 20]))
    assert looked[2:] == [[0, 9, 20]]
