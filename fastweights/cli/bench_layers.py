"""`fastweights bench layers`, `host`, `fwl` and `lab`: what layers cost, on a device and on its host."""

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from fastweights.cli.bench_options import (
    Device,
    Inputs,
    Json,
    On,
    Repeats,
    Smoke,
    agreeing,
    dtype_of,
    start,
    write,
)
from fastweights.cli.options import say
from fastweights.core import FastWeightError
from fastweights.files import write_json


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
        typer.Option("--compile", help="Time the first layer by torch.compile too, and on a GPU as a CUDA graph."),
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

    from fastweights.attention.presets import PRESETS
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
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Products of PyTorch's block on a GPU: float32, tf32 or bfloat16; repeatable. All when absent."
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
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # or TensorFlow tells what it found, a line each
    path = start("bench fwl", device, "fwl", smoke, json)
    from fastweights.bench import fwl as bench_fwl
    from fastweights.bench import report

    # On a GPU the three kinds of products that it has; on a CPU there is one.
    shapes = bench_fwl.SMOKE if smoke else bench_fwl.SHAPES[device]
    known = list(bench_fwl.TOLERANCE) if device == Device.cuda else ["float32"]
    for each in precision or ():
        if each not in known:
            raise FastWeightError(f"--precision is {each!r}; expected one of {', '.join(known)} on {device}")
    precisions, samples = precision or known, repeats or (2 if smoke else 10)
    found: dict[str, object] = {}

    def kept(name: str, payload: Callable[[Any], object]) -> Callable[[Any], None]:
        def tell(results: Any) -> None:  # minutes may lie between two: what is there is kept
            found[name] = payload(results)
            write_json(path, report.payload(device) | found)

        return tell

    with agreeing(len(shapes) * (len(precisions) + 1)) as advance:
        tell = kept("fwl", bench_fwl.payload)
        results = bench_fwl.run(shapes, device, precisions, samples, advance, tell)
        tell = kept("fwl_frameworks", bench_fwl.payload_frameworks)
        frameworks = bench_fwl.run_frameworks(shapes, device, samples, advance, framework, tell)
    bench_fwl.show(results, device, Console())
    bench_fwl.show_frameworks(frameworks, device, Console())
    say(f"Written to {path}")


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
