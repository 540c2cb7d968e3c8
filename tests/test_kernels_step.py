"""One token at a time as one kernel, against the equation; in Triton's interpreter where there is no GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import DEVICE, runs
from oracle import assert_close, oracle, problem

from fastweights import FastWeightError
from fastweights.core import Inputs, Spec
from fastweights.torch import fast_weight, kernels
from fastweights.torch.ops import choose


def tensors(args):
    return {n: torch.tensor(x, dtype=torch.float32, device=DEVICE) for n, x in args.items()}


@runs
@pytest.mark.parametrize("rates", [True, False])
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("rule", ["delta", "sum"])
def test_steps_equal_the_equation(rng, rule, read, rates):
    args = problem(rng, B=2, T=4, H=3, K=20, V=18, decay=rates)
    if not rates:
        del args["beta"]
    want = oracle(**args, rule=rule, read=read)
    x = tensors(args)
    S, outputs = x.pop("state"), []
    for t in range(4):
        o, S = fast_weight(**{n: a[:, t : t + 1] for n, a in x.items()}, state=S, rule=rule, read=read, method="kernel")
        outputs.append(o)
    for got, exact in zip((torch.cat(outputs, 1), S), want, strict=True):
        assert_close(got.double().cpu().numpy(), exact, 1e-6)


@runs
def test_a_state_is_overwritten_only_when_given_away(rng):
    x = tensors(problem(rng, B=2, T=1, H=2, K=16, V=16))
    before, S = x["state"].clone(), x["state"]
    o, after = fast_weight(**x, method="kernel")
    assert torch.equal(S, before)
    for named, where in (([], dict(out_state=S)), ([S], {})):
        S.copy_(before)
        with kernels.step.in_place(named):
            o_2, same = fast_weight(**x, method="kernel", **where)
        assert same is S
        assert torch.equal(S, after)
        assert torch.equal(o, o_2)
    assert fast_weight(**x, method="kernel")[1] is not S


def test_where_the_state_goes_without_a_kernel(rng):
    """`out_state` means the same for every method and length."""
    x = {n: torch.tensor(a) for n, a in problem(rng, B=2, T=5, H=2).items()}
    o, after = fast_weight(**x)
    elsewhere = torch.full_like(after, np.nan)
    assert fast_weight(**x, out_state=elsewhere)[1] is elsewhere
    assert torch.equal(elsewhere, after)
    o_2, S = fast_weight(**x, out_state=x["state"])
    assert S is x["state"]
    assert torch.equal(S, after)
    assert torch.equal(o, o_2)


def test_what_out_state_refuses(rng):
    x = {n: torch.tensor(a) for n, a in problem(rng, B=2, T=5, H=2).items()}
    with pytest.raises(FastWeightError, match=r"out_state is torch\.float64 \(1,\); expected float32 \(2, 2, 5, 7\)"):
        fast_weight(**x, out_state=torch.zeros(1, dtype=torch.float64))
    x["q"].requires_grad_()
    with pytest.raises(FastWeightError, match="out_state is given where gradients are wanted"):
        fast_weight(**x, out_state=x["state"])


@runs
def test_operators_pass_torchs_own_check(rng):
    x = tensors(problem(rng, B=1, T=1, H=2, K=16, V=16))
    inputs, spec = [x["q"], x["k"], x["v"], x["beta"], x["log_decay"]], Spec(norm="l2").as_text()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.step.step_op, ([*inputs, x["state"]], spec), test_utils=tests)
    torch.library.opcheck(kernels.step.step_op_, ([*inputs, None], x["state"], spec), test_utils=tests)


@runs
def test_the_quick_check_takes_every_branch_that_the_full_one_takes(monkeypatch):
    """Planned from the cases themselves, so that a case with a new branch is in the quick check at once."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from benchmarks import check_kernels, kernel_branches

    some = [(check, case) for check, case in check_kernels.checks() if case.get("T", 0) <= 128]
    taken = lambda which: {  # noqa: E731
        b for each in which for launch in check_kernels.plan(*each) for b in kernel_branches.branches(launch)
    }
    monkeypatch.setattr(check_kernels, "checks", lambda: some)
    quick, number = check_kernels.quick()
    assert taken(quick) == taken(some)
    assert number == len(taken(some)) > 1000
    assert len(quick) < len(some) / 2


def test_the_choice_for_one_token():
    token = Inputs(*[torch.zeros(1, 1, 1, 4)] * 3)
    assert choose(token, Spec()) == "recurrent"
    assert choose(token, Spec(), learning=False) == "recurrent"  # no GPU
    if torch.cuda.is_available():
        assert choose(Inputs(*(x.cuda() for x in token[:3])), Spec(), learning=False) == "kernel"
