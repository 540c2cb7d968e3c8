"""How kernels are compiled and launched: together, before any starts, once per kind; then by address alone."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from fastweights.torch.kernels import launch, plan

DEVICE = torch.device("cuda", 0)


class Kernel:
    """Stands for a Triton kernel; says what happened to it."""

    def __init__(self, name, log, meet=None):
        self.name, self.log, self.meet = name, log, meet

    def warmup(self, *arguments, grid, **options):
        if self.meet:
            self.meet.wait(timeout=120)  # two that wait for each other: only side by side do they go on
        self.log.append(f"compile {self.name}")
        return Compiled(self)


class Compiled:
    function = packed_metadata = None
    metadata = SimpleNamespace(global_scratch_size=0)

    def __init__(self, kernel):
        self.kernel = kernel
        self.arguments = None

    def __getitem__(self, grid):
        return None

    def run(self, x, y, z, stream, function, metadata, info, enter, leave, *arguments):
        self.kernel.log.append(f"start {self.kernel.name} {(x, y, z)} {arguments}")


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return []


def one(kernel, dtype=torch.float32, number=3, width=64):
    return launch.Launch(kernel, (2,), (0, None), (dtype, None), (number,), (width,), (("num_warps", 4),))


def test_all_kernels_of_a_plan_and_of_what_follows_are_compiled_first_and_side_by_side(log):
    meet = threading.Barrier(2)
    launch.compile_together([one(Kernel("one", log, meet)), one(Kernel("two", log, meet))], DEVICE)
    assert sorted(log) == ["compile one", "compile two"]


def test_a_launch_passes_addresses_numbers_and_constants(log):
    start = launch.launcher(one(Kernel("it", log)), DEVICE)
    start([4096, None], 7)  # what is absent is taken from the end
    assert log == ["compile it", "start it (2, 1, 1) (4096, None, 3, 64)"]


def test_what_a_kernel_is_compiled_for_is_dtype_kind_of_number_and_constants(log):
    kernel = Kernel("it", log)
    several = [{}, dict(width=128), dict(dtype=torch.bfloat16), dict(number=16), dict(number=1), dict(number=2**31)]
    for case in [*several, *several, dict(number=5)]:  # 5 is of the same kind as 3
        launch.launcher(one(kernel, **case), DEVICE)
    assert log.count("compile it") == len(several)


def test_threads_that_call_for_the_first_time_at_once_compile_once(log):
    slow = SimpleNamespace(wait=lambda timeout: time.sleep(0.2))  # long enough for the others to come
    kernel, ready = Kernel("it", log, slow), threading.Barrier(8)

    def first():
        ready.wait(timeout=120)
        launch.compile_together([one(kernel)], DEVICE)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == ["compile it"]


def test_a_plan_allocates_computes_and_returns_the_tensors_of_its_slots():
    given = [torch.arange(4.0), None]
    a_plan = plan.Plan(torch.device("cpu"), given)
    double = a_plan.compute(lambda x: 2 * x, (a_plan.inputs[0],), (4,), torch.float32)
    room = a_plan.empty((3,), torch.float64)
    first, second = a_plan.run(*given), a_plan.run(torch.ones(4), None)
    assert a_plan.inputs[1] is None
    assert torch.equal(first[double.place], torch.tensor([0.0, 2.0, 4.0, 6.0]))
    assert torch.equal(second[double.place], torch.full((4,), 2.0))
    assert first[room.place].shape == (3,)
    assert first[room.place].data_ptr() != second[room.place].data_ptr()


def test_plans_of_lengths_that_never_repeat_do_not_pile_up():
    kept = {}
    for n in range(10):
        plan.keep(kept, (n,), n, most=4)
    assert len(kept) <= 4
    assert kept[(9,)] == 9


def test_inputs_at_odd_addresses_are_copied():
    x = torch.arange(9.0)[1:]
    assert x.data_ptr() % 16
    y = plan.aligned(x)
    assert y.data_ptr() % 16 == 0
    assert torch.equal(x, y)
    assert plan.aligned(y) is y
