"""An interleaved timer: contestants take turns, so that a slow moment of the machine falls on all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Call = Callable[[], object]
Advance = Callable[[str, float], None]  # (what is being timed, steps done since): moves the progress bar


class Timing(NamedTuple):
    """Milliseconds: the median of the samples and their quartiles.

    Attributes:
        median: half of the samples are below.
        low, high: a quarter of them is below, above.
        repeats: how many there were.
    """

    median: float
    low: float
    high: float
    repeats: int

    @property
    def noisy(self) -> bool:
        """Whether a quarter of the samples lie over 15% from the median, on either side."""
        return self.high > 1.15 * self.median or self.low < 0.85 * self.median

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """From samples in milliseconds.

        Examples:
            >>> Timing.of([3.0, 1.0, 2.0, 5.0, 4.0])
            Timing(median=3.0, low=2.0, high=4.0, repeats=5)
        """
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))


def interleave(
    contestants: Mapping[str, Call],
    *,
    repeats: int,
    device: str = "cpu",
    tick: Callable[[], None] = lambda: None,
    by: "Clock | None" = None,
) -> dict[str, Timing]:
    """Time each callable `repeats` times, in turns, after one call each that does not count.

    Every round starts with another contestant, so that none always follows the same one. On "cuda" the clock is a
    pair of events around each call, with the cache cleared before it; nothing waits until all calls are queued.

    Args:
        contestants: name -> call without arguments.
        repeats: samples of each.
        device: "cpu" or "cuda".
        tick: called after each sample, outside the clock.
        by: the clock, in place of the device's own or the wall's.

        >>> timings = interleave({"sum": lambda: sum(range(100)), "len": lambda: len("abc")}, repeats=3)
        >>> [(name, timing.repeats) for name, timing in timings.items()]
        [('sum', 3), ('len', 3)]
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; expected at least 1")
    for call in contestants.values():
        call()
    by = by or (CudaClock() if device == "cuda" else CpuClock())
    samples: dict[str, list[Callable[[], float]]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(by.sample(contestants[name]))
            tick()
    return {name: Timing.of([read() for read in reads]) for name, reads in samples.items()}


class CpuClock:
    """Wall time."""

    def sample(self, call: Call) -> Callable[[], float]:
        """Call it now; the function that is returned tells how many milliseconds that took."""
        start = time.perf_counter()
        call()
        elapsed = 1e3 * (time.perf_counter() - start)
        return lambda: elapsed


class ProcessorClock:
    """Processor time of this process: what other programs take does not count. For one thread."""

    def sample(self, call: Call) -> Callable[[], float]:
        """Call it; a function that says the milliseconds of processor time it took."""
        start = time.process_time()
        call()
        elapsed = 1e3 * (time.process_time() - start)
        return lambda: elapsed


class CudaClock:
    """Time on the GPU, read when everything has been queued."""

    CACHE_BYTES = 256 * 2**20  # more than the last-level cache of any GPU
    AHEAD = 2_000_000  # cycles, about 1 ms, in which the host queues the call: it may have just queued a slower one

    def __init__(self) -> None:
        import torch

        self.cache = torch.empty(self.CACHE_BYTES, dtype=torch.uint8, device="cuda")

    def sample(self, call: Call) -> Callable[[], float]:
        """Queue the call between two events; the function that is returned waits and tells the milliseconds between
        them.
        """
        import torch

        from fastweights.torch import private

        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.cache.zero_()
        private.sleep(self.AHEAD)
        start.record()
        call()
        stop.record()

        def read() -> float:
            stop.synchronize()
            return start.elapsed_time(stop)

        return read


Clock = CpuClock | ProcessorClock | CudaClock


def clock(device: str) -> Clock:
    """The GPU's own clock; on a CPU the wall's, or the processor's where there is one thread.

    On a shared machine the wall's clock counts what other programs take; with one thread processor time is the better.
    """
    import torch

    if device == "cuda":
        return CudaClock()
    return ProcessorClock() if torch.get_num_threads() == 1 else CpuClock()
