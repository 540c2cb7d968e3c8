"""Time this library against the others, after checking that all compute the same.

All numbers go to `benchmarks/<machine>-<commit>.json`, or where `--json` says.

For example: `fastweights bench memory --shape 1,2048,4,64 --rule delta`
"""

from typing import Annotated

import typer
from rich.console import Console

from fastweights.cli.bench_options import (
    Decays,
    Device,
    Inputs,
    Json,
    Methods,
    On,
    Rules,
    Smoke,
    agreeing,
    dtype_of,
    rules_of,
    start,
    write,
)
from fastweights.cli.options import say
from fastweights.files import write_json


def memory(
    shape: Annotated[
        list[str] | None, typer.Option(metavar="B,T,H,K[,V]", help="Shape of the inputs to time; repeatable.")
    ] = None,
    rule: Rules = None,
    features: Annotated[
        str, typer.Option(help="Feature map of queries and keys, such as dpfp-3, within the time.")
    ] = "identity",
    norm: Annotated[str, typer.Option(help="Norm of the features: none, sum or l2.")] = "none",
    decay: Decays = None,
    method: Methods = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Peer to time, such as FLA, or none; repeatable. All installed when absent."),
    ] = None,
    device: On = Device.cpu,
    dtype: Inputs = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples per contestant; 20 when absent.")] = None,
    softmax: Annotated[bool, typer.Option("--softmax", help="Time causal softmax attention too.")] = False,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time the memory, forward and forward+backward.

    Contestants are our methods and, where they are installed, Hugging Face's delta rules, flash-linear-attention (FLA)
    and fast-transformers. They take turns, so that a slow moment of the machine falls on all alike. Outputs, states and
    gradients are first compared with float64; when one deviates, nothing is reported and the exit code is 1. With one
    thread (OMP_NUM_THREADS=1) on a CPU the clock is the processor's, which other programs disturb less than the wall's.

    For example: `fastweights bench memory --rule delta --decay none --decay head --decay channel`
    """
    path = start("bench memory", device, "", smoke, json)
    from fastweights.bench import memory as bench_memory
    from fastweights.bench import report
    from fastweights.bench.case import parse_shape

    # Shapes that were asked for, or those of the device; tiny ones for a smoke test.
    shapes = [parse_shape(text) for text in shape or ()]
    shapes = shapes or list(bench_memory.SMOKE if smoke else bench_memory.SHAPES[device])
    how = (features, norm, decay or ("none",))
    cases = bench_memory.cases(shapes, rules_of(rule), device, dtype_of(dtype, device), *how)
    with agreeing(bench_memory.STEPS * len(cases)) as advance:
        results = bench_memory.run(
            cases,
            repeats=repeats or (2 if smoke else 20),
            methods=method or (),
            only=peer or (),
            softmax=softmax,
            advance=advance,
            tell=lambda done: write_json(path, report.payload(device, done)),
        )
    report.show(results, Console())
    say(f"Written to {path}")


def lengths(
    rule: Rules = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Method of ours to time; repeatable. The automatic one when absent.")
    ] = None,
    device: On = Device.cpu,
    dtype: Inputs = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples per length; 5 when absent.")] = None,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Measure time and space of the memory at (1, T, 4, 64) as T doubles, forward+backward.

    That is one text of T tokens, 4 heads of width 64. Where cost is linear, twice the tokens take twice the time, and
    the extra memory per token stays the same.

    For example: `fastweights bench lengths --rule delta --repeats 3`
    """
    # What could stop the work is checked first; heavy imports come after.
    path = start("bench lengths", device, "lengths", smoke, json)
    from fastweights.bench import lengths as bench_lengths
    from fastweights.bench import report

    sizes = bench_lengths.SMOKE if smoke else bench_lengths.LENGTHS
    asked = bench_lengths.cases(sizes, rules_of(rule), method or ["auto"], device, dtype_of(dtype, device))
    with agreeing(bench_lengths.STEPS * len(asked)) as advance:
        samples = repeats or (2 if smoke else 5)
        scalings = [bench_lengths.run(*case, repeats=samples, advance=advance) for case in asked]
    report.show_lengths(scalings, Console())
    write(path, report.payload(device, scalings=scalings))
