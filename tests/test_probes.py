"""Probes: measurements against a loop over the equation, not a bit of any output changed, cheap, plain errors."""

import math
import time

import numpy as np
import pytest
import torch
from oracle import assert_close, problem
from torch import nn

import fastweights.torch as fw
from fastweights.core import Inputs, Spec
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.torch.probing.measures import measure

FORMS = {
    "sum": dict(rule="sum"),
    "delta": dict(decay=False),
    "delta, decay per channel, erase": dict(decay="channel", erase=True),
    "delta, two writes": dict(writes=2),
}


def looped(args, rule, writes, every):
    """Every measurement, token by token, from the equation: ({name: (B, T, H)}, {name: (B, M, H)})."""
    S, (B, T, H) = args["state"], args["q"].shape[:3]
    beta, size = args["beta"], np.linalg.norm
    log_a = args.get("log_decay", np.zeros((B, T, H)))
    of_writes, of_marks, start, keys, old = {}, {}, S, [], None

    def note(table, **values):
        for name, x in values.items():
            table.setdefault(name, []).append(x)

    for t in range(T):
        a = np.exp(log_a[:, t])
        S = (a[..., None] if a.ndim == 3 else a[..., None, None]) * S
        for j in range(t * writes, t * writes + writes):
            k, v, b = args["k"][:, j], args["v"][:, j], beta[:, j]
            e = args["erase"][:, j] if "erase" in args else k
            r = np.einsum("bhkv,bhk->bhv", S, e)
            u = b[..., None] * (v - r if rule == "delta" else v)
            mean = log_a[:, t].mean(-1) if a.ndim == 3 else log_a[:, t]
            note(
                of_writes, beta=b, decay=np.exp(mean if j == t * writes else 0 * mean), gain=b * (e * k).sum(-1),
                value=size(v, axis=-1), retrieved=size(r, axis=-1), error=size(v - r, axis=-1),
                cosine=(v * r).sum(-1) / size(v, axis=-1) / size(r, axis=-1),
                written=size(k[..., None] * u[..., None, :], axis=(-1, -2)),
            )  # fmt: skip
            S = S + k[..., None] * u[..., None, :]
            keys.append(k)
        if (t + 1) % every == 0 or t + 1 == T:
            s = np.linalg.svd(S, compute_uv=False)
            rank = (s**2).sum(-1) ** 2 / (s**4).sum(-1)
            moved = np.full((B, H), math.nan)
            if old is not None:
                ask = lambda M: np.stack([np.einsum("bhkv,bhk->bhv", M, k) for k in old])  # noqa: B023, E731
                moved = np.sqrt(((ask(S) - ask(start)) ** 2).sum((0, -1)) / (ask(start) ** 2).sum((0, -1)))
            span = log_a[:, t + 1 - len(keys) // writes : t + 1]
            span = span.mean(-1) if span.ndim == 4 else span
            with np.errstate(divide="ignore"):
                life = -math.log(2) / np.where(span.mean(1) < 0, span.mean(1), -0.0)
            note(of_marks, norm=size(S, axis=(-1, -2)), rank=rank, capacity=rank / min(S.shape[-2:]),
                 interference=moved, half_life=life)  # fmt: skip
            old, keys, start = keys, [], S
    return tuple({n: np.stack(x, 1) for n, x in table.items()} for table in (of_writes, of_marks))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [16, 7])
def test_measurements_are_those_of_the_equation(rng, form, every):
    how = dict(FORMS[form])
    rule, writes = how.pop("rule", "delta"), how.get("writes", 1)
    args = problem(rng, B=2, T=37, H=2, K=4, V=5, **how)
    found = measure(Inputs(**{n: torch.from_numpy(x) for n, x in args.items()}), Spec(rule=rule, writes=writes), every)
    want = looped(args, rule, writes, every)
    for got, table in zip((found.writes, found.marks), want, strict=True):
        assert set(table) == set(got._fields)
        for name, x in table.items():
            assert_close(getattr(got, name).numpy(), x, name=name)
    assert found.at.tolist() == [*range(every, 37, every), 37]


def test_parts_of_a_text_measure_as_the_whole(rng):
    args = {n: torch.from_numpy(x) for n, x in problem(rng, B=1, T=64, H=2, K=4, V=4).items()}
    whole = measure(Inputs(**args), Spec(), 8)
    cut = lambda a, b, **more: Inputs(**{n: x if n == "state" else x[:, a:b] for n, x in args.items()} | more)  # noqa: E731
    first = measure(cut(0, 32), Spec(), 8)
    second = measure(cut(32, 64, state=first.state), Spec(), 8, keys=first.keys)
    for name in whole.marks._fields:
        both = torch.cat([getattr(first.marks, name), getattr(second.marks, name)], 1)
        assert_close(both.numpy(), getattr(whole.marks, name).numpy(), name=name)


def test_packed_texts_are_measured_apart(rng):
    args = {n: torch.from_numpy(x) for n, x in problem(rng, B=1, T=20, H=2, K=4, V=4, sequences=2).items()}
    packed = measure(Inputs(**args, cu_seqlens=torch.tensor([0, 9, 20])), Spec(), 4)
    alone = measure(Inputs(**{n: x[1:] if n == "state" else x[:, 9:] for n, x in args.items()}), Spec(), 4)
    assert_close(packed.writes.retrieved[:, 9:].numpy(), alone.writes.retrieved.numpy())
    assert_close(packed.marks.norm[:, 3:].numpy(), alone.marks.norm.numpy())
    assert packed.at.tolist() == [4, 8, 9, 13, 17, 20]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LanguageModel(Config(dim=32, heads=2, layers="gated-delta,linear,softmax,kda", length=32), 257).eval()


def test_not_a_bit_changes_and_names_are_found(model):
    row = torch.randint(257, (1, 129))

    def losses():
        """In two calls: products of other sizes may round otherwise."""
        first = model.score(row[:, :64], row[:, 1:65])
        return torch.cat([first.loss, model.score(row[:, 64:-1], row[:, 65:], first.state).loss], 1)

    with torch.no_grad():
        plain = losses()
        with fw.probe(model, every=16) as p:
            seen = losses()
        again = losses()
    assert torch.equal(plain, again)
    assert torch.equal(plain, seen)
    assert p.names == [*(f"blocks.{i}.mixer.layer" for i in (0, 1, 3)), "fast"]
    assert p["block.0"].beta.shape == p["beta", 0].shape == (1, 128, 2)
    assert p["blocks.3.mixer.layer"].norm.shape == (1, 8, 2)
    assert p["blocks.1"].at.tolist() == list(range(16, 129, 16))
    assert np.isfinite(p["block.3"].interference[:, 4]).all(), "the second call knows the keys of the first"
    layer = p["fast"]
    assert layer.gain.shape == layer.loss.shape == (1, 128)
    assert_close(layer.loss, seen.numpy())
    assert layer.step.shape[1] == len(layer.at) == 3
    assert (layer.step > 0).all()


@pytest.mark.parametrize("how", [dict(refresh=8), dict(refresh=8, within="cumulative"), dict()])
def test_steps_of_a_fast_weight_layer_are_the_changes_of_its_weights(how):
    """Where one step is taken, what was learned is that step."""
    torch.manual_seed(1)
    block = fw.FWLBlock(8, vocab_size=20, inputs=6, normalizer=4.0, **how).double()
    T = 9 if how else 1
    x, labels = torch.randn(2, T, 6).double(), torch.randint(20, (2, T))
    with torch.no_grad(), fw.probe(block) as p:
        out = block.run(x, labels, torch.ones(2, T).double())
    learned = sum(S.square().flatten(1).sum(1) for S in out.state[:3]).sqrt()
    assert_close(p["fast"].step[:, 0], learned.numpy())
    assert_close(p["fast"].learned[:, -1], learned.numpy())
    assert_close(p["fast"].slow_loss, block.slow_loss(x, labels).detach().numpy())


@pytest.mark.parametrize("rule", ["sum", "delta"])
def test_steps_of_tokens_are_the_changes_of_the_weights(rule):
    torch.manual_seed(1)
    block = fw.FWLBlock(8, vocab_size=20, inputs=6, normalizer=4.0, step_size=0.5, rule=rule).double()
    x, labels, weights = torch.randn(1, 4, 6).double(), torch.randint(20, (1, 4)), torch.ones(1, 4).double()
    with torch.no_grad(), fw.probe(block) as p:
        block.run(x, labels, weights)
    with torch.no_grad():
        states = [block.run(x[:, :t], labels[:, :t], weights[:, :t]).state[:3] for t in (1, 2, 3, 4)]
    for t in (1, 2, 3):
        change = sum((a - b).square().sum() for a, b in zip(states[t], states[t - 1], strict=True)).sqrt()
        assert_close(p["fast"].step[0, t], change.numpy())


@pytest.mark.parametrize("preset", ["delta-attention-norm", "linear-transformer"])
def test_the_normaliser_is_no_part_of_the_memory(preset):
    layer = fw.FastWeightAttention.preset(preset, 16, heads=2)
    with torch.no_grad(), fw.probe(layer, every=5) as p:
        _, state = layer(torch.randn(2, 10, 16))
    assert p["memory"].beta.shape == (2, 10, 2)
    assert_close(p["memory"].norm[:, -1], state.memory.flatten(2).norm(dim=-1).numpy(), 1e-5)


def test_a_kept_call_says_where_reads_came_from(model):
    layer = model.blocks[0].mixer.layer
    x = torch.randn(1, 24, 32)
    with torch.no_grad(), fw.probe(layer, keep=True) as p:
        _, state = layer(x[:, :10])
        layer(x[:, 10:], state)
    with torch.no_grad(), fw.probe(layer, keep=True) as whole:
        layer(x)
    pair = [q["memory"].attribution().rows().weights for q in (p, whole)]
    assert pair[0].shape == (1, 24, 2, 24)
    assert torch.allclose(*pair, atol=1e-5)
    with fw.probe(layer) as p:
        layer(x)
    with pytest.raises(fw.FastWeightError, match=r"keep=True"):
        p["memory"].attribution()


@pytest.mark.parametrize("library", ["matplotlib", "plotly"])
def test_figures(model, library):
    pytest.importorskip(library)
    row = torch.randint(257, (1, 97))
    with torch.no_grad(), fw.probe(model) as p:
        model.score(row[:, :-1], row[:, 1:])
    for kind in ("norms", "half-lives", "error", "losses", "steps"):
        made = p.figure(kind, backend=library)
        lines = made.data if library == "plotly" else [*made.axes[0].lines, *made.axes[0].images]
        assert len(lines) == dict(error=1, losses=2, steps=1).get(kind, 6), kind
    with pytest.raises(fw.FastWeightError, match=r"kind is 'colour'; expected one of 'norms'"):
        p.figure("colour")
    with pytest.raises(fw.FastWeightError, match=r"backend is 'bokeh'"):
        p.figure("norms", backend="bokeh")


def test_cost():
    """At most twice the time at every=16, by the processor's clock; after the probe is closed nothing is left."""
    torch.manual_seed(0)
    model = LanguageModel(Config(dim=128, heads=4, depth=2), 257).eval()
    row = torch.randint(257, (1, 513))

    def run():
        with torch.no_grad():
            model.score(row[:, :-1], row[:, 1:])

    def seconds(probed):
        start = time.process_time()
        if probed:
            with fw.probe(model, every=16):
                run()
        else:
            run()
        return time.process_time() - start

    run()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    times = [(seconds(False), seconds(True)) for _ in range(8)]
    plain, probed = (min(x) for x in zip(*times, strict=True))
    assert probed < 2 * plain
    from fastweights.torch import watching

    assert watching.watchers == watching.steps == []
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert "run" not in vars(model.fast)


def test_errors_say_what_is_wrong(model):
    with pytest.raises(fw.FastWeightError, match=r"model is a list; expected an nn.Module"):
        fw.probe([])
    with pytest.raises(fw.FastWeightError, match=r"every is 0; expected a positive whole number"):
        fw.probe(model, every=0)
    stranger = nn.Linear(2, 2)
    with pytest.raises(fw.FastWeightError, match=r"no module of the Linear wrote into a memory"), fw.probe(stranger):
        stranger(torch.zeros(1, 2))
    with fw.probe(model) as p:
        pass
    with pytest.raises(fw.FastWeightError, match=r"expected one of none: nothing was recorded"):
        p["block.0"]
    with pytest.raises(fw.FastWeightError, match=r"the probe recorded no memory"):
        p.figure("norms")
    layer = fw.FastWeightAttention(8, heads=2)
    with fw.probe(layer) as p:
        layer(torch.zeros(1, 4, 8)), layer(torch.zeros(2, 4, 8))
    with pytest.raises(fw.FastWeightError, match=r"batches of \[1, 2\]; expected one size"):
        p["memory"].beta  # noqa: B018
    with pytest.raises(fw.FastWeightError, match=r"layer is 1; expected 0 to 0"):
        p[1]
    with pytest.raises(AttributeError, match=r"no 'betas'"):
        p[0].betas  # noqa: B018
