"""Time this library against the others, after checking that all compute the same.

All numbers go to `benchmarks/<machine>-<commit>.json`, or where `--json` says.

For example: `fastweights bench memory --shape 1,2048,4,64 --rule delta`
"""

from typing import Annotated

import typer
from rich.console import Console

from fastweights.cli.bench_options import (
    Device,
    Inputs,
    Json,
    Methods,
    On,
    Repeats,
    Rules,
    Smoke,
    agreeing,
    dtype_of,
    rules_of,
    start,
    write,
)
from fastweights.core import FastWeightError


def memory(
    shape: Annotated[
        list[str] | None, typer.Option(metavar="B,T,H,K[,V]", help="Shape of the inputs to time; repeatable.")
    ] = None,
    rule: Rules = None,
    features: Annotated[
        str, typer.Option(help="Feature map of queries and keys, such as dpfp-3, within the time.")
    ] = "identity",
    norm: Annotated[str, typer.Option(help="Norm of the features: none, sum or l2.")] = "none",
    method: Methods = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Peer to time, such as FLA; repeatable. All installed when absent.")
    ] = None,
    device: On = Device.cpu,
    dtype: Inputs = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples per contestant; 20 when absent.")] = None,
    softmax: Annotated[bool, typer.Option("--softmax", help="Time causal softmax attention too.")] = False,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time the memory, forward and forward+backward.

    Contestants are our methods and, where they are installed, Hugging Face's delta rule, flash-linear-attention (FLA)
    and fast-transformers. They take turns, so that a slow moment of the machine falls on all alike. Outputs, states and
    gradients are first compared with float64; when one deviates, nothing is reported and the exit code is 1.

    For example: `fastweights bench memory --rule sum --softmax --repeats 50`
    """
    path = start("bench memory", device, "", smoke, json)
    from fastweights.bench import memory as bench_memory
    from fastweights.bench import report
    from fastweights.bench.case import parse_shape

    # Shapes that were asked for, or those of the device; tiny ones for a smoke test.
    shapes = [parse_shape(text) for text in shape or ()]
    shapes = shapes or list(bench_memory.SMOKE if smoke else bench_memory.SHAPES[device])
    cases = bench_memory.cases(shapes, rules_of(rule), device, dtype_of(dtype, device), features, norm)
    with agreeing(bench_memory.STEPS * len(cases)) as advance:
        results = bench_memory.run(
            cases,
            repeats=repeats or (2 if smoke else 20),
            methods=method or (),
            only=peer or (),
            softmax=softmax,
            advance=advance,
        )
    report.show(results, Console())
    write(path, report.payload(device, results))


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


def layers(
    name: Annotated[
        list[str] | None, typer.Option(help="Layer to time: a preset, or 'default'; repeatable. All when absent.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples per layer; 20 when absent.")] = None,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time layers beside their projections alone and their memory alone, forward+backward.

    The last column is the layer's time over the sum of the two: what feature maps, convolution, norms and gates cost.

    For example: `fastweights bench layers --name default --name gated-deltanet`
    """
    path = start("bench layers", "cpu", "layers", smoke, json)
    from fastweights.bench import layers as bench_layers
    from fastweights.bench import report

    # A misspelt name is said before anything is timed.
    for each in name or ():
        if each not in bench_layers.NAMES:
            raise FastWeightError(f"--name is {each!r}; expected one of {', '.join(bench_layers.NAMES)}")
    names = name or bench_layers.NAMES
    sizes = bench_layers.SMOKE if smoke else bench_layers.DEFAULT
    with agreeing(len(names)) as advance:
        results = bench_layers.run(names, **sizes, repeats=repeats or (2 if smoke else 20), advance=advance)
    bench_layers.show(results, Console(), **sizes)
    write(path, report.payload("cpu") | {"layers": bench_layers.payload(results, sizes)})


def host(
    device: On = Device.cpu,
    dtype: Inputs = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Time torch.compile of the first layer too."),
    ] = False,
    name: Annotated[
        list[str] | None,
        typer.Option("--layer", help="Preset to time as a layer; repeatable. All when absent, deltanet first."),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time FLA too, whose first call tunes itself for minutes.")
    ] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples per contestant, of 20 calls each.")] = None,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time what a call costs the host in eager mode: the operation, each layer and one block, beside attention's own.

    The host is the CPU's side: checking arguments, launching kernels, building the graph of gradients. On a GPU it
    bounds small calls, since the device waits for it.

    For example: `fastweights bench host --device cuda --compile --layer deltanet`
    """
    path = start("bench host", device, "host", smoke, json)
    import torch

    from fastweights.attention_config import PRESETS
    from fastweights.bench import host as bench_host
    from fastweights.bench import report

    shape, kind = bench_host.SMOKE if smoke else bench_host.SHAPE, getattr(torch, dtype_of(dtype, device))
    for each in name or ():
        if each not in PRESETS:
            raise FastWeightError(f"--layer is {each!r}; expected one of {', '.join(PRESETS)}")
    # DeltaNet first: it is the layer that the comparison with attention is about.
    layers = name or ["deltanet", *(each for each in PRESETS if each != "deltanet")]
    samples = repeats or (1 if smoke else 10)
    with agreeing(bench_host.steps(samples, layers, compiled, device)) as advance:
        results = bench_host.run(
            shape, device, kind, samples, layers=layers, compiled=compiled, peers=peers, advance=advance
        )
    bench_host.show(results, shape, device, kind, Console())
    write(path, report.payload(device) | {"host": bench_host.payload(results, shape, kind)})


def fwl(
    device: On = Device.cpu,
    framework: Annotated[
        list[str] | None,
        typer.Option(
            help="Framework besides PyTorch to time: jax, keras or none; repeatable. All installed ones when absent."
        ),
    ] = None,
    repeats: Repeats = None,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time a Fast Weight Layer: on a CPU a training step with and without it, on a GPU the block alone.

    The layer is the output block that learns from the text it reads. It is timed in its published form and with a
    refresh every 64 tokens, beside the same block that learns nothing. Then the block of every framework that is
    installed, alone: PyTorch, JAX, and Keras on the backend it is set to.

    For example: `fastweights bench fwl --device cuda`
    """
    path = start("bench fwl", device, "fwl", smoke, json)
    from fastweights.bench import fwl as bench_fwl
    from fastweights.bench import report

    # On a GPU the three kinds of products that it has; on a CPU there is one.
    shapes = bench_fwl.SMOKE if smoke else bench_fwl.SHAPES[device]
    precisions = ["float32", "tf32", "bfloat16"] if device == Device.cuda else ["float32"]
    samples = repeats or (2 if smoke else 10)
    with agreeing(len(shapes) * (len(precisions) + 1)) as advance:
        results = bench_fwl.run(shapes, device, precisions, samples, advance)
        frameworks = bench_fwl.run_frameworks(shapes, device, samples, advance, framework)
    bench_fwl.show(results, device, Console())
    bench_fwl.show_frameworks(frameworks, device, Console())
    found = {"fwl": bench_fwl.payload(results), "fwl_frameworks": bench_fwl.payload_frameworks(frameworks)}
    write(path, report.payload(device) | found)


def lab(repeats: Repeats = None, smoke: Smoke = False, json: Json = None) -> None:
    """Time training steps of the overwriting experiment beside the published algorithm, a loop over tokens.

    Both draw the same kind of batches and must have the same loss and gradients before any time is reported.

    For example: `fastweights bench lab --repeats 20`
    """
    path = start("bench lab", "cpu", "lab", smoke, json)
    from fastweights.bench import lab as bench_lab
    from fastweights.bench import report

    # Ours and the published loop take turns; both count.
    samples = repeats or (2 if smoke else 10)
    with agreeing(2 * samples) as advance:
        result = bench_lab.run(samples, advance, **(bench_lab.SMOKE if smoke else {}))
    bench_lab.show(result, Console())
    write(path, report.payload("cpu") | {"lab": bench_lab.payload(result)})
