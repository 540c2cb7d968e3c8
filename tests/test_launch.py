"""How kernels are compiled: those of a call and of the backward pass to follow, side by side, before any starts."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from fastweights.torch.kernels import launch

GPU = SimpleNamespace(is_cuda=True)


class Kernel:
    """Stands for a Triton kernel; says what happened to it."""

    def __init__(self, name, log, meet=None):
        self.name, self.log, self.meet = name, log, meet

    def warmup(self, *arguments, grid, **options):
        if self.meet:
            self.meet.wait(timeout=10)  # two that wait for each other: only side by side do they go on
        self.log.append(f"compile {self.name}")
        return Compiled(self)

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.log.append(f"compile {self.name}")
            self.log.append(f"start {self.name}")
            return Compiled(self)

        return run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.log.append(f"start {self.kernel.name}")


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    return []


def start(kernel, x=None, width=64):
    launch.start(kernel, (1,), (torch.zeros(8) if x is None else x, None), (3,), (width,), num_warps=4)


def test_all_kernels_of_a_call_and_of_what_follows_are_compiled_first_and_side_by_side(log):
    meet = threading.Barrier(2)
    one, two = Kernel("one", log, meet), Kernel("two", log, meet)

    def everything():
        start(one)
        start(two)

    launch.together(lambda: start(one), everything, GPU)
    assert sorted(log[:2]) == ["compile one", "compile two"]
    assert log[2:] == ["start one"]
    launch.together(lambda: start(two), everything, GPU)
    assert log[3:] == ["start two"]


def test_what_a_kernel_is_compiled_for_is_dtype_alignment_and_constants(log):
    kernel = Kernel("it", log)
    several = [dict(), dict(width=128), dict(x=torch.zeros(8, dtype=torch.bfloat16)), dict(x=torch.zeros(9)[1:])]
    for case in [*several, *several]:
        run = lambda case=case: start(kernel, **case)  # noqa: E731
        launch.together(run, run, GPU)
    assert log.count("compile it") == 4
    assert log.count("start it") == 8


def test_without_a_gpu_or_outside_of_such_a_call_a_kernel_just_starts(log):
    kernel = Kernel("it", log)
    launch.together(lambda: start(kernel), None, SimpleNamespace(is_cuda=False))
    start(kernel)
    assert log == ["compile it", "start it", "start it"]


def test_an_error_on_the_way_leaves_nothing_behind(log):
    kernel = Kernel("it", log)

    def broken():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        launch.together(lambda: start(kernel), broken, GPU)
    start(kernel)
    assert log == ["compile it", "start it"]
