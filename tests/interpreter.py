"""Where kernels run: on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from fastweights.torch import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(DEVICE == "cpu" and not kernels.INTERPRETED, reason="needs CUDA or Triton's interpreter")
elsewhere = pytest.mark.skipif(DEVICE == "cuda" or kernels.INTERPRETED, reason="the tests below run by themselves")


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory is NaN, a kernel's scratch of bytes too, so that an element left unwritten cannot pass."""
    from fastweights.torch.kernels.plan import Plan

    def filled(x):
        if x.dtype == torch.uint8:
            return x.fill_(255)  # four bytes of it are a NaN of float32, two one of bfloat16
        return x.fill_(float("nan")) if x.dtype.is_floating_point else x

    def allocate(plan, given, _make=Plan._allocate):
        tensors = _make(plan, given)
        for place, *_ in plan.fresh:
            filled(tensors[place])
        return tensors

    monkeypatch.setattr(Plan, "_allocate", allocate)
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _make=make, **kw: filled(_make(*a, **kw)))


def run_in_the_interpreter(*files):
    """All tests of these files, in one process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
