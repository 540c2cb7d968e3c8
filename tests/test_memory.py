"""`fast_weight` in every framework, held to the one oracle."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_close, oracle, oracle_gradients, problem

from fastweights import FastWeightError

METHODS = ["recurrent", "chunked"]
RULES = ["delta", "sum"]
READS = ["after", "before"]
grid = [
    pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"]),
    pytest.mark.parametrize("read", READS),
    pytest.mark.parametrize("rule", RULES),
]


def over_the_grid(test):
    for mark in grid:
        test = mark(test)
    return test


def assert_matches(backend, args, *, tolerance=1e-9, **how):
    call = {n: how[n] for n in ("rule", "read") if n in how}
    for name, got, want in zip(("output", "state"), backend.run(args, **how), oracle(**args, **call), strict=True):
        assert_close(got, want, tolerance, name)


@over_the_grid
@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 130])  # nothing, one token, around one chunk, past two
@pytest.mark.parametrize("method", METHODS)
def test_matches_the_oracle(backend, rng, method, T, rule, read, decay):
    assert_matches(backend, problem(rng, T=T, decay=decay), rule=rule, read=read, method=method)


@pytest.mark.parametrize("rule", RULES)
def test_matches_the_oracle_over_a_thousand_tokens(backend, rng, rule):
    assert_matches(backend, problem(rng, T=1000), rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_one_head_and_no_options(backend, rng, method, rule):
    args = problem(rng, H=1, K=7, V=3, decay=False)
    assert_matches(backend, {n: args[n] for n in "qkv"}, rule=rule, method=method)


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 100])
def test_chunk_size_changes_nothing(backend, rng, chunk_size):
    assert_matches(backend, problem(rng, T=70), method="chunked", chunk_size=chunk_size)


@over_the_grid
@pytest.mark.parametrize("method", METHODS)
def test_gradients_match_the_oracle(backend, rng, method, rule, read, decay):
    args = problem(rng, T=37, decay=decay)
    do, dS = rng.standard_normal(args["v"].shape), rng.standard_normal(args["state"].shape)
    got = backend.gradients(args, do, dS, rule=rule, read=read, method=method, chunk_size=16)
    for name, want in oracle_gradients(args, do, dS, rule=rule, read=read).items():
        assert_close(got[name], want, name=name)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.sampled_from(range(0, 71, 7)), max_size=3),
    method=st.sampled_from(METHODS),
    rule=st.sampled_from(RULES),
)
def test_any_split_of_a_sequence_equals_the_whole(backend, cuts, method, rule):
    """Lengths are multiples of 7, which are none of 64, so that JAX compiles ten of them and not seventy."""
    args = problem(np.random.default_rng(1), B=1, T=70, H=2)
    bounds = [0, *sorted(cuts), 70]
    outputs, state = [], args["state"]
    for a, b in pairwise(bounds):
        piece = {n: x if n == "state" else x[:, a:b] for n, x in args.items()}
        o, state = backend.run(piece | {"state": state}, rule=rule, method=method)
        outputs.append(o)
    o, S = oracle(**args, rule=rule)
    assert_close(np.concatenate(outputs, 1), o, name="output")
    assert_close(state, S, name="state")


def test_outputs_ignore_later_tokens(backend, rng):
    args = problem(rng, T=70)
    later = problem(rng, T=70)
    changed = {n: x if n == "state" else np.concatenate([x[:, :33], later[n][:, 33:]], 1) for n, x in args.items()}
    np.testing.assert_array_equal(backend.run(args)[0][:, :33], backend.run(changed)[0][:, :33])


def test_reading_before_ignores_the_token_itself(backend, rng):
    args, other = problem(rng, T=20), problem(rng, T=20)
    changed = args | {"v": np.concatenate([args["v"][:, :-1], other["v"][:, -1:]], 1)}
    np.testing.assert_array_equal(backend.run(args, read="before")[0], backend.run(changed, read="before")[0])


def test_sum_rule_is_masked_attention(backend, rng):
    q, k, v = (problem(rng)[n] for n in "qkv")
    scores = np.tril(np.einsum("bthk,bshk->bhts", q, k))
    assert_close(backend.run(dict(q=q, k=k, v=v), rule="sum")[0], np.einsum("bhts,bshv->bthv", scores, v))


@pytest.mark.parametrize("method", METHODS)
def test_delta_rule_is_a_dictionary(backend, rng, method):
    """With orthonormal keys and beta = 1, reading a key returns the last value written to it."""
    K, T = 8, 100
    key = rng.integers(0, K, T)
    keys = np.eye(K)[key].reshape(1, T, 1, K)
    values = rng.standard_normal((1, T, 1, 3))
    _, S = backend.run(dict(q=keys, k=keys, v=values), method=method)
    last = np.stack([values[0, key == i, 0][-1] for i in range(K)])
    assert_close(S[0, 0], last, 1e-12)


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_equal_keys_stay_exact(backend, rng, strength):
    """All keys equal: each write replaces the last (or, at beta = 2, mirrors it). Powers of L would overflow."""
    T, K = 4096, 8
    k = np.full((1, T, 1, K), K**-0.5)
    args = dict(q=k, k=k, v=rng.standard_normal((1, T, 1, 2)), beta=np.full((1, T, 1), strength))
    assert_matches(backend, args, tolerance=1e-11, method="chunked")


def test_zero_keys_write_nothing(backend, rng):
    args = problem(rng, T=10, decay=False)
    _, S = backend.run(args | {"k": np.zeros_like(args["k"])})
    np.testing.assert_array_equal(S, args["state"])


CU_SEQLENS = np.array([0, 7, 7, 40, 41, 130], dtype=np.int32)  # one empty, one of a single token


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences_do_not_leak(backend, rng, method, rule):
    args = problem(rng, B=1, T=130, sequences=5)
    o, S = backend.run(args, cu_seqlens=CU_SEQLENS, rule=rule, method=method, chunk_size=16)
    for n, (a, b) in enumerate(pairwise(CU_SEQLENS)):
        alone = {name: x[n : n + 1] if name == "state" else x[:, a:b] for name, x in args.items()}
        want_o, want_S = oracle(**alone, rule=rule)
        assert_close(o[:, a:b], want_o, name=f"output {n}")
        assert_close(S[n : n + 1], want_S, name=f"state {n}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(backend, rng, method, side):
    """Two sequences of 5 and 9 tokens padded to 12: what the padding holds, NaN here, is never seen."""
    T, lengths = 12, (5, 9)
    args = problem(rng, T=T)
    mask = np.zeros((2, T), dtype=bool)
    for row, n in enumerate(lengths):
        mask[row, slice(0, n) if side == "right" else slice(T - n, T)] = True
    padded = {n: x if n == "state" else np.where(mask.reshape(2, T, *[1] * (x.ndim - 2)), x, np.nan)
              for n, x in args.items()}  # fmt: skip
    o, S = backend.run(padded, mask=mask, method=method)
    np.testing.assert_array_equal(o[~mask], 0)
    for row in range(2):
        alone = {n: x[row : row + 1] if n == "state" else x[row, mask[row]][None] for n, x in args.items()}
        want_o, want_S = oracle(**alone)
        assert_close(o[row, mask[row]], want_o[0], name="output")
        assert_close(S[row], want_S[0], name="state")


def test_state_is_float32_and_output_keeps_its_dtype(backend, rng):
    args = {n: x.astype(np.float32) for n, x in problem(rng).items()}
    o, S = backend.run(args)
    assert o.dtype == S.dtype == np.float32
    want_o, want_S = oracle(**args)
    assert_close(o.astype(np.float64), want_o, 1e-5)
    assert_close(S.astype(np.float64), want_S, 1e-5)


def bad(**change):
    return lambda args: args | change


SHAPE = (2, 5, 3, 4)
ERRORS = [
    (lambda a: a | {"q": a["q"][0]}, r"q has shape \(5, 3, 4\); expected four axes \(B, T, H, K\)"),
    (lambda a: a | {"k": a["k"][:, :4]}, r"k has shape \(2, 4, 3, 4\); expected \(2, 5, 3, 4\): the shape of q"),
    (lambda a: a | {"v": a["v"][:1]}, r"v has shape \(1, 5, 3, 7\); expected \(2, 5, 3, 7\)"),
    (lambda a: a | {"beta": a["beta"].swapaxes(1, 2)},
     r"beta has shape \(2, 3, 5\); expected \(2, 5, 3\): one write rate per token and head"),
    (lambda a: a | {"log_decay": a["log_decay"][..., None]},
     r"log_decay has shape \(2, 5, 3, 1\); expected \(2, 5, 3\)"),
    (lambda a: a | {"state": a["state"][:1]}, r"state has shape \(1, 3, 4, 7\); expected \(2, 3, 4, 7\)"),
    (lambda a: a | {"k": a["k"].astype(np.float32)}, "k has dtype float32; expected float64: the dtype of q"),
    (lambda a: a | {"state": a["state"].astype(np.float32)}, "state has dtype float32; expected float64"),
    (lambda a: a | {"q": a["q"].astype(np.int32)}, "q has dtype int32; expected float64 or float32 or"),
    (bad(rule="gated"), "rule is 'gated'; expected one of 'delta', 'sum'"),
    (bad(read="now"), "read is 'now'; expected one of 'after', 'before'"),
    (bad(method="fast"), "method is 'fast'; expected one of 'auto', 'recurrent', 'chunked'"),
    (bad(chunk_size=0), "chunk_size is 0; expected a positive whole number"),
    (bad(mask=np.ones((2, 4), bool)), r"mask has shape \(2, 4\); expected \(2, 5\): True for a real token"),
    (bad(cu_seqlens=np.array([0, 5])), "q has batch 2 with cu_seqlens; expected 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m[:24] for _, m in ERRORS])
def test_errors_say_what_was_got_and_expected(backend, rng, change, message):
    args = change(problem(rng, T=5, K=4))
    how = {n: args.pop(n) for n in list(args) if n in ("rule", "read", "method", "chunk_size", "mask", "cu_seqlens")}
    with pytest.raises(FastWeightError, match=message):
        backend.run(args, **how)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 5], "cu_seqlens starts at 1; expected 0"),
        ([0, 3, 2, 5], "cu_seqlens falls from 3 to 2 at index 2; expected sorted"),
        ([0, 4], "cu_seqlens ends at 4; expected T = 5"),
        ([0], r"cu_seqlens has shape \(1,\); expected \(N \+ 1,\)"),
        ([0.0, 5.0], "cu_seqlens has dtype float64; expected int32 or int64"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_cu_seqlens_errors(backend, rng, method, offsets, message):
    args = problem(rng, B=1, T=5)
    del args["state"]
    with pytest.raises(FastWeightError, match=message):
        backend.run(args, cu_seqlens=np.array(offsets), method=method)


def test_debug_scans_the_values(backend, rng):
    import fastweights

    args = problem(rng, T=5)
    args["k"][1, 2, 0, 3] = np.nan
    backend.run(args)  # not scanned: it costs a pass
    with fastweights.debug():
        with pytest.raises(FastWeightError, match=r"k has nan at \(1, 2, 0, 3\); expected finite numbers \(1 such"):
            backend.run(args)
        with pytest.raises(FastWeightError, match=r"beta has 3.0 at \(0, 0, 0\); expected rates in \[0, 2\]"):
            backend.run(args | {"k": args["q"], "beta": np.full_like(args["beta"], 3.0)})
        backend.run(problem(rng, T=5))


def test_the_log_says_which_method_ran_and_why(backend, rng, caplog):
    caplog.set_level("DEBUG", logger="fastweights")
    backend.run(problem(rng, T=1))
    backend.run(problem(rng, T=3))
    backend.run(problem(rng, T=3), method="recurrent")
    lines = [r.getMessage() for r in caplog.records if r.name == "fastweights"]
    for line, method, why in zip(
        lines, ("recurrent", "chunked", "recurrent"), ("one token", "", "asked for by name"), strict=True
    ):
        assert line.startswith(f"fast_weight: {method}, ")
        assert why in line
        assert "float64" in line
        assert "rule='delta'" in line
