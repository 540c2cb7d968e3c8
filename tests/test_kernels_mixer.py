"""A layer between its projections as one plan, against its plain form in float64; interpreted where there is no GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreter import DEVICE, poison, runs  # noqa: F401 - a fixture

from fastweights.attention import AttentionState, between_projections
from fastweights.attention.config import AttentionConfig
from fastweights.models.compiled import compile_blocks
from fastweights.models.config import Config
from fastweights.models.documents import Documents
from fastweights.models.language_model import LanguageModel
from fastweights.torch import hand_gradients, packing
from fastweights.torch.framework import OPS
from fastweights.torch.kernels import mixer, mixer_operators
from fastweights.torch.kernels.mixer_plan import N_DIFFERENTIABLE, LayerTensors
from fastweights.torch.tree import map_tensors

CHECKS = ("test_schema", "test_faketensor")

LAYERS = {
    "delta network": dict(features="dpfp-2", norm="sum", out_norm=False),
    "deltanet": dict(conv=4),
    "gated deltanet": dict(conv=3, decay="learned", gate=True, beta_max=2.0),
    "sum of raw keys": dict(rule="sum", features="identity", norm="none", gate="sigmoid", value_dim=24),
    "elu": dict(features="elu+1", norm="sum", out_norm=False, key_dim=20),
    "retnet": dict(rule="sum", decay="retnet", norm="none", features="identity", gate=True),
    "relu": dict(rule="sum", features="relu", norm="l2", beta=True, decay="learned", conv=2, value_dim=24),
}


PACKED = torch.tensor([0, 1, 40, 40, 43, 107, 110])  # a token, an odd text, none, three, a whole chunk, three


def problem(config, T, *, state, B=2, packed=None):
    torch.manual_seed(T)
    draw = lambda *shape: torch.randn(*shape, device=DEVICE)  # noqa: E731
    weights = {name: draw(*config.shapes[name]) if name in config.shapes else None
               for name in ("conv", "decay_log", "decay_bias", "out_norm")}  # fmt: skip
    memory = before = None
    N, B = (B, B) if packed is None else (len(packed) - 1, 1)
    if state:
        memory = draw(N, config.heads, config.feature_width, config.value_width)
        before = draw(N, config.conv - 1, config.channels) if config.conv else None
    p = draw(B, T, sum(config.sections.values()))
    return LayerTensors(p, *weights.values(), memory, before, None if packed is None else packed.to(DEVICE))


def plain(config, given, method="chunked"):
    """(y, memory, last inputs) in plain operators."""
    state = None if given.memory is None else AttentionState(given.memory, None, given.before)
    layer = SimpleNamespace(**given._asdict(), projection=None)
    y, state = between_projections(config, OPS, layer, given.p, state, method=method, cu_seqlens=given.cu_seqlens)
    return y, state.memory, state.conv


def fused(config, given):
    y, state = mixer.mix(config, given)
    return y, state.memory, state.conv


def results(run, config, given, dtype):
    """Outputs, then gradients of everything."""
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in given[:N_DIFFERENTIABLE]]
    outputs = [o for o in run(config, LayerTensors(*leaves, given.cu_seqlens)) if o is not None]
    ups = [torch.arange(o.numel(), device=DEVICE).view(o.shape).cos().to(o.dtype) for o in outputs]
    return *outputs, *torch.autograd.grad(outputs, [x for x in leaves if x is not None], ups)


@runs
@pytest.mark.parametrize("T, state, packed", [(70, True, None), (64, False, None), (1, True, None),
                                              (110, True, PACKED), (110, False, PACKED)])  # fmt: skip
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients(name, T, state, packed):
    config = AttentionConfig(32, 2, **LAYERS[name])
    given = problem(config, T, state=state, packed=packed)
    assert mixer.takes(config, given)
    exact = results(plain, config, given, torch.float64)
    ways = (results(run, config, given, torch.float32) for run in (fused, plain))
    for want, got, usual in zip(exact, *ways, strict=True):
        assert got.shape == want.shape
        rounding = (usual.double() - want).abs().max()  # what plain PyTorch loses in float32
        assert (got.double() - want).abs().max() <= 2 * rounding + 1e-6 * want.abs().max()


@runs
@pytest.mark.parametrize("packed", [None, torch.tensor([0, 2, 2, 5])])
def test_second_derivatives(packed):
    config = AttentionConfig(16, 2, **LAYERS["gated deltanet"])
    given, found = problem(config, 5, state=True, B=1, packed=packed), []
    for run in (fused, plain):
        leaves = [x.clone().requires_grad_() for x in given[:N_DIFFERENTIABLE]]
        y = run(config, LayerTensors(*leaves, given.cu_seqlens))[0]
        once = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in once), leaves))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@runs
def test_a_stream_cut_anywhere_equals_the_whole():
    config = AttentionConfig(16, 2, **LAYERS["gated deltanet"])
    given = problem(config, 20, state=True)
    with torch.no_grad():
        whole = fused(config, given)
        for cut in (1, 7, 19):
            y, memory, before = fused(config, given._replace(p=given.p[:, :cut]))
            rest = fused(config, given._replace(p=given.p[:, cut:], memory=memory, before=before))
            torch.testing.assert_close((torch.cat([y, rest[0]], 1), *rest[1:]), whole, rtol=1e-4, atol=1e-4)


@runs
@pytest.mark.parametrize(
    "name, packed", [("delta network", None), ("gated deltanet", None), ("gated deltanet", PACKED)]
)
def test_compiled(name, packed):
    config = AttentionConfig(16, 2, **LAYERS[name])
    given = problem(config, 70 if packed is None else 110, state=name != "delta network", packed=packed)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(*(results(run, config, given, torch.float32) for run in (compiled, fused)))
    with torch.no_grad():
        torch.testing.assert_close(compiled(config, given)[:2], fused(config, given)[:2])


@runs
@pytest.mark.parametrize("name", ["delta network", "gated deltanet"])
def test_tables_of_fixed_shapes_need_no_look_at_the_offsets(name, monkeypatch):
    """As a CUDA graph is given them: rows beyond the last, which hold no token, change nothing."""
    config = AttentionConfig(16, 2, **LAYERS[name])
    given = problem(config, 110, state=True, packed=PACKED)
    want = results(plain, config, given, torch.float64)
    monkeypatch.setattr(packing.Sequences, "of", None)
    with packing.fixed_shapes():
        got = results(fused, config, given._replace(cu_seqlens=given.cu_seqlens.clone()), torch.float32)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@runs
def test_operators_pass_torchs_own_check():
    config = AttentionConfig(16, 2, **LAYERS["gated deltanet"])
    given = problem(config, 5, state=True)
    torch.library.opcheck(mixer_operators.mix_op, (list(given), config.text, True), test_utils=CHECKS)
    y, memory, last, *saved = mixer.forward(config, given, save=True)
    torch.library.opcheck(
        mixer_operators.mix_backward_op, ([y, memory, last], list(given), saved, config.text), test_utils=CHECKS
    )


@runs
def test_what_it_leaves_to_plain_operators():
    config = AttentionConfig(16, 2, **LAYERS["deltanet"])
    given = problem(config, 5, state=True)
    assert mixer.takes(config, given)
    assert not mixer.takes(config, given._replace(memory=given.memory[:1]))
    assert not mixer.takes(config, given._replace(p=given.p.double()))
    assert not mixer.takes(config, given._replace(conv=given.conv.double()))
    for other in (dict(writes=2), dict(norm="attention", features="elu+1"),
                  dict(decay="channel"), dict(key_heads=1)):  # fmt: skip
        assert not mixer.suits(AttentionConfig(16, 2, **other))


@runs
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step_on_packed_rows_takes_the_plan(compiled, monkeypatch):
    config = Config(dim=16, heads=2, depth=2, head="linear", length=24, batch=2, compile=compiled)
    starts = np.zeros((2, 24), bool)
    starts[0, [0, 9]], starts[1, 23] = True, True
    tokens = torch.randint(256, (2, 25), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found, calls, looks = [], [], []
    real, check = mixer.forward, packing.check_offsets
    monkeypatch.setattr(mixer, "forward", lambda *given, **how: calls.append(1) or real(*given, **how))
    monkeypatch.setattr(packing, "check_offsets", lambda *given: looks.append(1) or check(*given))
    for plan in (False, True):
        monkeypatch.setattr(hand_gradients, "_on_gpu", lambda x, plan=plan: plan)
        torch.manual_seed(0)
        model = LanguageModel(config, 257).to(DEVICE)
        if compiled and plan:
            compile_blocks(model, "aot_eager")
        torch.manual_seed(1)
        state = map_tensors(torch.randn_like, model.init_state(2))
        documents = Documents.of(starts, DEVICE, even=compiled)
        scores = model.score(tokens[:, :-1], tokens[:, 1:], state, documents=documents)
        scores.loss.sum().backward()
        found.append([scores.loss, *(s.memory for s in scores.state.blocks), *(p.grad for p in model.parameters())])
        assert len(calls) == (2 if plan else 0)  # once per block
    assert not looks  # offsets that the host knows are not asked of the device
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
