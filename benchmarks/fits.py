"""Which kernels fit the shared memory of other GPUs: `python -m benchmarks.fits [GPU ...]`, minutes each, without any.

Every launch of forward and backward passes is recorded instead of made, then compiled for each kind of GPU. That a
kernel compiles and fits does not say that it is right or fast there: the kernels have run on an H200 alone.
"""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastweights.core import Inputs, Spec
from fastweights.features import parse
from fastweights.torch.kernels import blocks, memory_plan

GPUS = {"A100": (80, 163), "RTX 4090": (89, 99), "H200": (90, 227), "B200": (100, 227), "RTX 5090": (120, 99)}  # KiB
SHAPES = (  # widths of keys, before their features, and values
    (torch.bfloat16, "identity", ((16, 16), (64, 64), (128, 128), (256, 256), (512, 64))),
    (torch.bfloat16, "dpfp-3", ((16, 16), (32, 32))),
    (torch.bfloat16, "silu", ((64, 64),)),
    (torch.float32, "identity", ((64, 64), (128, 128))),
)
RULES = (True, True), (True, False), (False, False)  # delta, decay
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}


def launches(dtype, K, V, delta, rates, name, hopper):
    """The launches of a forward and a backward pass, as `Launch` records."""
    q, k, v = (torch.zeros(1, 128, 2, width, dtype=dtype) for width in (K, K, V))
    beta = torch.zeros(1, 128, 2, dtype=dtype) if rates or delta else None
    state = torch.zeros(1, 2, parse(name).width(K), V)
    inputs = Inputs(q, k, v, beta, beta if rates else None, state=state)
    spec = Spec("delta" if delta else "sum", features=name, norm="none" if name == "identity" else "l2")
    tma = lambda layout, q, BK, V, BV: hopper and q.shape[-1] == BK and V % BV == 0 and dtype != torch.float32  # noqa: E731
    with patch.object(blocks, "uses_tma", tma), patch.object(blocks, "_multiprocessors", lambda device: 132):
        given = [*memory_plan.aligned_arrays(inputs, spec), None, None, None]
        shapes = memory_plan.saved_shapes(inputs, spec)
        saved = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in shapes]
        plans = (
            memory_plan.plan_forward(given, inputs, spec, True, save=True),
            memory_plan.plan_backward([v, None, *given, *saved], inputs, spec, True),
        )
    return [launch for plan in plans for launch in plan.launches]


def shared(job, arch):
    """KiB of shared memory."""
    signature, fixed, aligned = {}, {}, {}
    kernel, pointers, numbers = job.kernel, len(job.dtypes), len(job.numbers)
    arguments = (*job.dtypes, *job.numbers, *job.constants)
    for n, (name, x) in enumerate(zip(kernel.arg_names, arguments, strict=True)):
        if n < pointers and x is not None:
            signature[name], aligned[n,] = POINTERS[x], [["tt.divisibility", 16]]
        elif n < pointers or n >= pointers + numbers:
            signature[name], fixed[n,] = "constexpr", x
        else:
            signature[name] = "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(job.options)).metadata.shared / 1024


def distinct(hopper):
    """(launch, where it was met) of every kernel, over dtypes, rules, rates and shapes."""
    found = {}
    for (dtype, name, widths), (delta, rates) in itertools.product(SHAPES, RULES):
        for K, V in widths:
            for job in launches(dtype, K, V, delta, rates, name, hopper):
                found[job.kernel, job.dtypes, job.constants] = (
                    job,
                    f"{dtype}, {name} {K} x {V}, delta {delta}, decay {rates}",
                )
    return list(found.values())


def main(*names):
    failures = 0
    for gpu in names or GPUS:
        arch, room = GPUS[gpu]
        jobs = distinct(hopper=arch == 90)
        with ThreadPoolExecutor() as pool:
            needs = list(pool.map(lambda job: shared(job[0], arch), jobs))  # noqa: B023
        over = [(need, job.kernel, where) for need, (job, where) in zip(needs, jobs, strict=True) if need > room]
        failures += len(over)
        print(f"{gpu}: {len(jobs)} kernels, at most {max(needs):.0f} of {room} KiB, {len(over)} do not fit", flush=True)
        for need, kernel, where in over:
            print(f"    {kernel.__name__} needs {need:.0f} KiB: {where}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])
