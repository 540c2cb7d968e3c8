"""The general memory in every framework, held to the one oracle: decay per channel, an erase key, several writes."""

from itertools import pairwise

import numpy as np
import pytest
from oracle import assert_close, oracle, oracle_gradients, problem

from fastweights import FastWeightError

METHODS = ["recurrent", "chunked"]
FORMS = {  # "hard" holds ordinary decays too
    "hard": dict(decay="hard"),
    "erase": dict(decay=True, erase=True),
    "erase-plain": dict(decay=False, erase=True),
    "writes": dict(decay=True, writes=2),
    "all": dict(decay="hard", erase=True, writes=3),
}
CASES = [
    (rule, read, form)
    for form, shape in FORMS.items()
    for rule, read in (("delta", "before"), ("delta" if shape.get("erase") else "sum", "after"))
]


@pytest.mark.parametrize(("rule", "read", "form"), CASES, ids=["-".join(case) for case in CASES])
@pytest.mark.parametrize("method", METHODS)
def test_matches_the_oracle_with_its_gradients(backend, rng, method, rule, read, form):
    args, writes = problem(rng, T=19, **FORMS[form]), FORMS[form].get("writes", 1)
    how = dict(rule=rule, read=read, writes=writes)
    o, S = oracle(**args, **how)
    for name, got, want in zip(("output", "state"), backend.run(args, **how, method=method, chunk_size=8), (o, S),
                               strict=True):  # fmt: skip
        assert_close(got, want, name=name)
    do, dS = rng.standard_normal(o.shape), rng.standard_normal(S.shape)
    got = backend.gradients(args, do, dS, **how, method=method, chunk_size=8)
    for name, want in oracle_gradients(args, do, dS, **how).items():
        assert_close(got[name], want, name=name)


@pytest.mark.parametrize("chunk_size", [5, 64])
def test_chunk_size_changes_nothing(backend, rng, chunk_size):
    args = problem(rng, T=33, **FORMS["all"])
    got = backend.run(args, writes=3, method="chunked", chunk_size=chunk_size)
    for a, b in zip(got, oracle(**args, writes=3), strict=True):
        assert_close(a, b)


def test_other_lengths_and_auto(backend, rng):
    for T in (0, 1, 130):
        args = problem(rng, T=T, **FORMS["all"])
        for a, b in zip(backend.run(args, writes=3), oracle(**args, writes=3), strict=True):
            assert_close(a, b, name=f"T={T}")


def tokens(args, a, b, n, **change):
    """args of tokens a to b, which have n writes each."""
    each = {name: 1 if name in ("q", "log_decay") else n for name in args if name != "state"}
    return args | {name: args[name][:, m * a : m * b] for name, m in each.items()} | change


def test_a_split_sequence_equals_the_whole(backend, rng):
    args = problem(rng, B=1, T=30, **FORMS["all"])
    state, outputs = args["state"], []
    for a, b in pairwise((0, 1, 17, 30)):
        o, state = backend.run(tokens(args, a, b, 3, state=state), writes=3)
        outputs.append(o)
    want = oracle(**args, writes=3)
    assert_close(np.concatenate(outputs, 1), want[0], name="output")
    assert_close(state, want[1], name="state")


@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences_do_not_leak(backend, rng, method):
    cu_seqlens = np.array([0, 7, 7, 20, 21, 40], dtype=np.int32)
    args = problem(rng, B=1, T=40, sequences=5, **FORMS["all"])
    o, S = backend.run(args, cu_seqlens=cu_seqlens, writes=3, method=method, chunk_size=16)
    for n, (a, b) in enumerate(pairwise(cu_seqlens)):
        want_o, want_S = oracle(**tokens(args, a, b, 3, state=args["state"][n : n + 1]), writes=3)
        assert_close(o[:, a:b], want_o if b > a else o[:, a:b], name=f"output {n}")
        assert_close(S[n : n + 1], want_S, name=f"state {n}")


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(backend, rng, method):
    """What the padding holds, NaN here, is never seen."""
    args, mask = problem(rng, T=9, **FORMS["all"]), np.zeros((2, 9), dtype=bool)
    mask[0, :5] = mask[1, 2:] = True
    padded = {}
    for name, x in args.items():
        real = np.repeat(mask, x.shape[1] // 9, 1) if name != "state" else None
        padded[name] = x if real is None else np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, np.nan)
    o, S = backend.run(padded, mask=mask, writes=3, method=method)
    np.testing.assert_array_equal(o[~mask], 0)
    for row, (a, b) in enumerate(((0, 5), (2, 9))):
        alone = {name: x[row : row + 1] for name, x in args.items()}
        want_o, want_S = oracle(**tokens(alone, a, b, 3), writes=3)
        assert_close(o[row : row + 1, a:b], want_o, name="output")
        assert_close(S[row : row + 1], want_S, name="state")


def test_equal_decay_of_all_channels_is_decay_of_the_head(backend, rng):
    args = problem(rng, T=20)
    wide = args | {"log_decay": np.repeat(args["log_decay"][..., None], args["q"].shape[-1], -1)}
    for a, b in zip(backend.run(wide), backend.run(args), strict=True):
        assert_close(a, b)


def test_several_writes_are_tokens_that_nobody_reads(backend, rng):
    """n writes without decay: the outputs of every n-th token of a call that reads after each."""
    args = problem(rng, T=12, decay=False)
    want, S = backend.run(args)
    got = backend.run(args | {"q": args["q"][:, 2::3]}, writes=3)
    assert_close(got[0], want[:, 2::3])
    assert_close(got[1], S)


@pytest.mark.parametrize("method", METHODS)
def test_hard_decays_in_float32(backend, rng, method):
    args = {n: x.astype(np.float32) for n, x in problem(rng, T=32, K=8, **FORMS["hard"]).items()}
    assert args["log_decay"].sum(1).min() < -2000
    want = oracle(**args)
    for a, b in zip(backend.run(args, method=method), want, strict=True):
        assert_close(a.astype(np.float64), b, 1e-5)
    up = [np.ones_like(x, dtype=np.float32) for x in want]
    for name, g in backend.gradients(args, *up, method=method).items():
        assert np.isfinite(g).all(), name


def change(**arrays):
    return lambda args: args | arrays


ERRORS = [
    (lambda a: a | {"log_decay": np.zeros((2, 5, 3, 3))},
     r"log_decay has shape \(2, 5, 3, 3\); expected \(2, 5, 3\) or \(2, 5, 3, 4\): one log decay per token and head"),
    (lambda a: a | {"erase": a["k"][..., :3]}, r"erase has shape \(2, 5, 3, 3\); expected \(2, 5, 3, 4\): one key"),
    (lambda a: a | {"erase": a["k"].astype(np.float32)}, "erase has dtype float32; expected float64: the dtype of q"),
    (lambda a: a | {"erase": a["k"], "rule": "sum"}, "erase is given with rule='sum'; expected None: this rule"),
    (change(writes=2), r"k has shape \(2, 5, 3, 4\); expected \(2, 10, 3, 4\): one key per write, 2 for each token"),
    (change(writes=0), "writes is 0; expected a positive whole number"),
    (change(writes=1.5), "writes is 1.5; expected a positive whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m[:24] for _, m in ERRORS])
def test_errors_say_what_was_got_and_expected(backend, rng, change, message):
    args = change(problem(rng, T=5, K=4))
    how = {n: args.pop(n) for n in ("rule", "writes") if n in args}
    with pytest.raises(FastWeightError, match=message):
        backend.run(args, **how)


def test_debug_knows_padding_of_several_writes(backend, rng):
    import fastweights

    args, mask = problem(rng, T=4, writes=2), np.ones((2, 4), dtype=bool)
    mask[0, 3] = False
    args["v"][0, 7] = np.nan
    with fastweights.debug():
        backend.run(args, writes=2, mask=mask)
        with pytest.raises(FastWeightError, match=r"v has nan at \(0, 7, 0, 0\); expected finite numbers"):
            backend.run(args, writes=2)
