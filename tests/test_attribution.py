"""Attribution is exact: weights are what a change of a value does to an output, and they sum to the output."""

import numpy as np
import pytest
import torch
from oracle import assert_close, oracle, problem

import fastweights.torch as fw

FORMS = {  # the general equation: rule, read, and what `problem` makes of the rest
    "sum": dict(rule="sum", decay=False),
    "sum, decay, before": dict(rule="sum", read="before"),
    "sum, hard decay per channel": dict(rule="sum", decay="hard"),
    "delta": dict(decay=False),
    "delta, decay, before": dict(read="before"),
    "delta, decay per channel, erase": dict(decay="channel", erase=True),
    "delta, hard decay per channel": dict(decay="hard", read="before"),
    "delta, two writes, erase": dict(writes=2, erase=True, T=40),
    "delta, two writes, before": dict(writes=2, read="before", decay="channel", T=40),
}


def made(rng, rule="delta", read="after", writes=1, T=70, **form):
    """(arguments, how, Attribution): a start state, and a length over a chunk that is no multiple of one."""
    args = problem(rng, B=2, T=T, H=2, K=4, V=3, writes=writes, **form)
    how = dict(rule=rule, read=read, writes=writes)
    return args, how, fw.attribution(**{n: torch.from_numpy(x) for n, x in args.items()}, **how)


def outputs(args, how):
    return oracle(**args, **how)[0]


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_changing_a_value_changes(rng, form):
    args, how, found = made(rng, **FORMS[form])
    rows = found.rows().weights.numpy()
    plain = outputs(args, how)
    for s in (0, 3, 33, args["v"].shape[1] - 2):
        changed = args | dict(v=args["v"].copy())
        changed["v"][:, s, :, 0] += 1.0
        assert_close(rows[..., s], outputs(changed, how)[..., 0] - plain[..., 0], name=f"source {s}")


@pytest.mark.parametrize("form", FORMS)
def test_rows_sum_to_the_output(rng, form):
    args, how, found = made(rng, **FORMS[form])
    rows = found.rows()
    total = np.einsum("bths,bshv->bthv", rows.weights.numpy(), args["v"]) + rows.start.numpy()
    assert_close(total, outputs(args, how))
    some = [found.tokens - 1, 0, 7, 7]
    for one, all_of_them in zip(found.rows(some), rows, strict=True):
        assert_close(one.numpy(), all_of_them[:, some].numpy(), name="rows on demand, in any order")


@pytest.mark.parametrize("form", ["sum", "delta, decay per channel, erase", "delta, two writes, erase"])
def test_overwritten_is_what_a_write_removes(rng, form):
    """The memory without what a token took out is the memory that the sum rule would have made of it."""
    args, how, found = made(rng, **FORMS[form])
    rows, n = found.overwritten(), how["writes"]
    removed = np.einsum("bths,bshv->bthv", rows.weights.numpy(), args["v"]) + rows.start.numpy()
    S, decay = args["state"], np.exp(args.get("log_decay", np.zeros(args["q"].shape[:3])))
    for t in range(args["q"].shape[1]):
        a = decay[:, t]
        S = (a[..., None] if a.ndim == 3 else a[..., None, None]) * S
        for j in range(t * n, t * n + n):
            e = args.get("erase", args["k"])[:, j]
            take = args["beta"][:, j, :, None] * np.einsum("bhkv,bhk->bhv", S, e) * (how["rule"] == "delta")
            assert_close(removed[:, j], take, name=f"write {j}")
            S = S + args["k"][:, j, :, :, None] * (args["beta"][:, j, :, None] * args["v"][:, j] - take)[..., None, :]


def test_top_sources_are_the_largest(rng):
    args, _, found = made(rng)
    rows, top = found.rows([9, 60]).weights, found.top([9, 60], n=3)
    sizes = rows.abs() * torch.from_numpy(args["v"]).norm(dim=-1).transpose(1, 2)[:, None]
    assert torch.equal(top.write, sizes.argsort(-1, descending=True)[..., :3])
    assert_close(top.share.numpy(), (sizes.sort(-1, descending=True)[0][..., :3] / sizes.sum(-1, True)).numpy())
    assert_close(top.weight.numpy(), rows.gather(-1, top.write).numpy())
    assert bool((found.top_overwritten([9], n=1).write < 9).all())


def test_a_row_of_a_hundred_thousand_tokens(rng):
    T = 100_000
    k = torch.nn.functional.normalize(torch.randn(1, T, 1, 8), dim=-1)
    v, beta = torch.randn(1, T, 1, 4), torch.rand(1, T, 1)
    log_decay = -torch.rand(1, T, 1) * 1e-4
    rows = fw.attribution(k, k, v, beta=beta, log_decay=log_decay).rows(T - 1)
    o = fw.fast_weight(k, k, v, beta=beta, log_decay=log_decay)[0]
    assert torch.allclose((rows.weights[0, 0] @ v[0, :, 0])[0], o[0, -1, 0], atol=1e-4)


def test_features_and_padding_are_those_of_the_call(rng):
    args = {n: torch.from_numpy(x) for n, x in problem(rng, B=2, T=20, H=1, K=4, V=3).items()}
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :6] = False
    how = dict(features="silu", norm="l2", mask=mask)
    rows = fw.attribution(**args, **how).rows()
    o = fw.fast_weight(**args, **how, method="recurrent")[0]
    got = torch.einsum("bths,bshv->bthv", rows.weights, args["v"]) + rows.start
    assert_close(torch.where(mask[..., None, None], got, 0.0).numpy(), o.numpy())
    assert not rows.weights[1, :, :, :6].any()


def test_errors_say_what_is_wrong(rng):
    args, _, found = made(rng, T=10)
    with pytest.raises(fw.FastWeightError, match=r"tokens is 10; expected numbers of tokens from 0 to 9"):
        found.rows(10)
    with pytest.raises(fw.FastWeightError, match=r"n is 0; expected at least 1"):
        found.top([1], n=0)
    with pytest.raises(fw.FastWeightError, match=r"rule is 'hebb'"):
        fw.attribution(**{n: torch.from_numpy(x) for n, x in args.items()}, rule="hebb")
    q = torch.zeros(1, 4, 1, 2)
    with pytest.raises(fw.FastWeightError, match=r"v has shape"):
        fw.attribution(q, q, q[:, :3])
