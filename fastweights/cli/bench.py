"""Time this library against the others, after checking that all compute the same.

All numbers go to `benchmarks/<machine>-<commit>.json`, or where `--json` says.

For example: `fastweights bench memory --shape 1,2048,4,64 --rule delta`
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastweights.cli.options import need, say
from fastweights.core import FastWeightError
from fastweights.files import write_json


class Rule(StrEnum):
    """Rules that can be timed, as choices of an option."""

    delta = "delta"
    sum = "sum"


class Device(StrEnum):
    """Devices that can be timed on."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Dtypes of the inputs."""

    float32 = "float32"
    bfloat16 = "bfloat16"


On = Annotated[Device, typer.Option(help="Device to time on.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Samples per contestant; 10 when absent.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Take tiny sizes and 2 samples, to see whether it runs.")]
Json = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        writable=True,
        help="JSON file for all numbers; one in benchmarks/ when absent.",
        show_default=False,
    ),
]
Rules = Annotated[Rule | None, typer.Option(help="Rule of the memory to time; both when absent.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(help="Method of ours to time; repeatable. All but the loop over tokens when absent."),
]
Inputs = Annotated[
    Dtype | None, typer.Option(help="Dtype of the inputs; float32 on a CPU and bfloat16 on a GPU when absent.")
]


def _start(command: str, device: str, name: str, smoke: bool, json: Path | None) -> Path:
    """Where the numbers will go, once everything that could stop the work has been checked.

    Args:
        command: for messages.
        device: that will be timed on.
        name: of the benchmark, in the file's name.
        smoke: also a part of that name, so that tiny runs never replace real ones.
        json: the user's own path.
    """
    need(command, "torch", "torch")
    import torch

    from fastweights.bench import report

    if device == Device.cuda and not torch.cuda.is_available():
        raise FastWeightError("--device is cuda; PyTorch finds no GPU here")
    path = json or report.default_path(device, "-".join(part for part in (name, "smoke" * smoke) if part))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastWeightError(f"cannot write to {path.parent}: {error.strerror}") from None
    return path


@contextmanager
def _agreeing(steps: float) -> Iterator[Any]:
    """A progress bar; outputs that disagree end the program with code 1, and nothing is reported."""
    from fastweights.bench import report
    from fastweights.bench.agree import Disagreement

    try:
        with report.progress(steps) as advance:
            yield advance
    except Disagreement as error:
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _write(path: Path, payload: dict[str, Any]) -> None:
    """Write the numbers as JSON, and say where."""
    write_json(path, payload)
    say(f"Written to {path}")


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
    path = _start("bench memory", device, "", smoke, json)
    from fastweights.bench import memory as bench_memory
    from fastweights.bench import report
    from fastweights.bench.case import parse_shape

    # Shapes that were asked for, or those of the device; tiny ones for a smoke test.
    shapes = [parse_shape(text) for text in shape or ()]
    shapes = shapes or list(bench_memory.SMOKE if smoke else bench_memory.SHAPES[device])
    cases = bench_memory.cases(shapes, _rules(rule), device, _dtype(dtype, device), features, norm)
    with _agreeing(bench_memory.STEPS * len(cases)) as advance:
        results = bench_memory.run(
            cases,
            repeats=repeats or (2 if smoke else 20),
            methods=method or (),
            only=peer or (),
            softmax=softmax,
            advance=advance,
        )
    report.show(results, Console())
    _write(path, report.payload(device, results))


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
    path = _start("bench lengths", device, "lengths", smoke, json)
    from fastweights.bench import lengths as bench_lengths
    from fastweights.bench import report

    sizes = bench_lengths.SMOKE if smoke else bench_lengths.LENGTHS
    asked = bench_lengths.cases(sizes, _rules(rule), method or ["auto"], device, _dtype(dtype, device))
    with _agreeing(bench_lengths.STEPS * len(asked)) as advance:
        samples = repeats or (2 if smoke else 5)
        scalings = [bench_lengths.run(*case, repeats=samples, advance=advance) for case in asked]
    report.show_lengths(scalings, Console())
    _write(path, report.payload(device, scalings=scalings))


def _rules(rule: Rule | None) -> list[str]:
    """The rule that was asked for, or both."""
    return [rule.value] if rule else [r.value for r in Rule]


def _dtype(dtype: Dtype | None, device: Device) -> Dtype:
    """The dtype that was asked for, or the usual one of the device."""
    return dtype or (Dtype.bfloat16 if device == Device.cuda else Dtype.float32)


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
    path = _start("bench layers", "cpu", "layers", smoke, json)
    from fastweights.bench import layers as bench_layers
    from fastweights.bench import report

    # A misspelt name is said before anything is timed.
    for each in name or ():
        if each not in bench_layers.NAMES:
            raise FastWeightError(f"--name is {each!r}; expected one of {', '.join(bench_layers.NAMES)}")
    names = name or bench_layers.NAMES
    sizes = bench_layers.SMOKE if smoke else bench_layers.DEFAULT
    with _agreeing(len(names)) as advance:
        results = bench_layers.run(names, **sizes, repeats=repeats or (2 if smoke else 20), advance=advance)
    bench_layers.show(results, Console(), **sizes)
    _write(path, report.payload("cpu") | {"layers": bench_layers.payload(results, sizes)})


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
    path = _start("bench host", device, "host", smoke, json)
    import torch

    from fastweights.attention_config import PRESETS
    from fastweights.bench import host as bench_host
    from fastweights.bench import report

    shape, kind = bench_host.SMOKE if smoke else bench_host.SHAPE, getattr(torch, _dtype(dtype, device))
    for each in name or ():
        if each not in PRESETS:
            raise FastWeightError(f"--layer is {each!r}; expected one of {', '.join(PRESETS)}")
    layers = name or ["deltanet", *(each for each in PRESETS if each != "deltanet")]
    samples = repeats or (1 if smoke else 10)
    with _agreeing(bench_host.steps(samples, layers, compiled, device)) as advance:
        results = bench_host.run(
            shape, device, kind, samples, layers=layers, compiled=compiled, peers=peers, advance=advance
        )
    bench_host.show(results, shape, device, kind, Console())
    _write(path, report.payload(device) | {"host": bench_host.payload(results, shape, kind)})


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
    path = _start("bench fwl", device, "fwl", smoke, json)
    from fastweights.bench import fwl as bench_fwl
    from fastweights.bench import report

    shapes = bench_fwl.SMOKE if smoke else bench_fwl.SHAPES[device]
    precisions = ["float32", "tf32", "bfloat16"] if device == Device.cuda else ["float32"]
    samples = repeats or (2 if smoke else 10)
    with _agreeing(len(shapes) * (len(precisions) + 1)) as advance:
        results = bench_fwl.run(shapes, device, precisions, samples, advance)
        frameworks = bench_fwl.run_frameworks(shapes, device, samples, advance, framework)
    bench_fwl.show(results, device, Console())
    bench_fwl.show_frameworks(frameworks, device, Console())
    found = {"fwl": bench_fwl.payload(results), "fwl_frameworks": bench_fwl.payload_frameworks(frameworks)}
    _write(path, report.payload(device) | found)


def lm(
    device: On = Device.cpu,
    repeats: Repeats = None,
    smoke: Smoke = False,
    picture: Annotated[
        Path | None, typer.Option(help="Picture of time against length; beside the numbers when absent.")
    ] = None,
    json: Json = None,
) -> None:
    """Time the language model: on a CPU a training step, and the reading of longer and longer documents; on a GPU
    training steps of the paper's models.

    The step is timed beside the same model with Hugging Face's delta rule in place of ours, and gated-delta also beside
    Hugging Face's own model of the same sizes, Qwen3-Next without softmax layers or experts. All start from the same
    weights, and nothing is reported unless their losses agree.

    For example: `fastweights bench lm --repeats 20`
    """
    path = _start("bench lm", device, "lm", smoke, json)
    from fastweights.bench import lm as bench_lm
    from fastweights.bench import report

    # On a GPU the paper's models are timed as a whole; the comparisons below are for a CPU.
    if device == Device.cuda:
        with _agreeing(len(bench_lm.PAPER)) as advance:
            found = {}
            for preset, vocab in bench_lm.PAPER[:1] if smoke else bench_lm.PAPER:
                found[preset, vocab] = bench_lm.throughput(preset, vocab, device, repeats or (2 if smoke else 10))
                advance(preset, 1)
        bench_lm.show_throughput(found, device, Console())
        _write(path, report.payload(device) | {"training": bench_lm.throughput_payload(found)})
        return
    settings, lengths = (bench_lm.SMOKE_TRAIN, bench_lm.SMOKE_LENGTHS) if smoke else (bench_lm.TRAIN, bench_lm.LENGTHS)
    samples = repeats or (2 if smoke else 10)
    rounds = min(3, samples)
    with _agreeing(1 + 2 * rounds * len(lengths)) as advance:
        advance("training", 0)
        trainings = bench_lm.training(settings, samples)
        advance("training", 1)
        readings = bench_lm.reading(lengths, rounds, bench_lm.SMOKE_READ if smoke else {}, advance)
    bench_lm.show(trainings, readings, Console())
    picture = picture or path.with_suffix(".png")
    if bench_lm.plot(readings, picture):
        say(f"Drawn in {picture}")
    _write(path, report.payload(device) | {"lm": bench_lm.payload(trainings, readings)})


def train(
    size: Annotated[
        list[str] | None, typer.Option(help='Size to time: "0.9 M", "8 x 512" or "12 x 768"; repeatable.')
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Mixer of every block; repeatable. gated-delta and transformer when absent."),
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="Output layer: linear or fwl; repeatable. Both when absent.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=3, help="Words of the vocabulary.")] = 257,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per row; the size's own when absent.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows per step; the size's own when absent.")] = None,
    profile: Annotated[bool, typer.Option(help="Print what each part of a step costs.")] = True,
    peers: Annotated[
        bool, typer.Option("--peers", help="Time FLA's DeltaNet too, whose first step tunes itself for minutes.")
    ] = False,
    device: On = Device.cpu,
    repeats: Annotated[int | None, typer.Option(min=3, help="Steps per model; 9 when absent.")] = None,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time whole training steps: tokens per second, their share of the matrix peak, and what each part costs.

    On a GPU steps are timed eager and compiled, and nothing is reported unless their losses agree.

    For example: `fastweights bench train --device cuda --size "12 x 768"`
    """
    path = _start("bench train", device, "train", smoke, json)
    from fastweights.bench import report
    from fastweights.bench import train as bench_train

    sizes = bench_train.SMOKE if smoke else bench_train.SIZES
    if unknown := [each for each in size or () if each not in sizes]:
        raise FastWeightError(f"--size is {unknown[0]!r}; expected one of {', '.join(map(repr, sizes))}")
    rows = {name: value for name, value in (("length", length), ("batch", batch)) if value}
    sizes = {name: settings | rows for name, settings in sizes.items() if not size or name in size}
    asked = bench_train.cases(sizes, model or bench_train.MODELS, head or ("linear", "fwl"), device, peers)
    with _agreeing(len(asked)) as advance:
        steps = repeats or (3 if smoke else 9)
        results = bench_train.run(asked, vocab, device, repeats=steps, profile=profile, advance=advance)
    bench_train.show(results, device, Console())
    _write(path, report.payload(device) | {"train": bench_train.payload(results, vocab)})


def decode(device: On = Device.cpu, smoke: Smoke = False, json: Json = None) -> None:
    """Count the tokens per second of a model of 16 blocks that writes many texts at once, on a GPU also as a graph.

    A CUDA graph records the launches of one step and replays them without the host. Both ways must write the same
    tokens.

    For example: `fastweights bench decode --device cuda`
    """
    path = _start("bench decode", device, "decode", smoke, json)
    from fastweights.bench import decode as bench_decode
    from fastweights.bench import report

    config = bench_decode.SMOKE if smoke else bench_decode.FULL
    batches = bench_decode.BATCHES[:1] if smoke else bench_decode.BATCHES
    with _agreeing(len(batches)) as advance:
        tokens = 2 if smoke else 100 if device == Device.cuda else 10
        results = bench_decode.run(config, batches, device, tokens=tokens, advance=advance)
    bench_decode.show(results, config, device, Console())
    _write(path, report.payload(device) | {"decode": bench_decode.payload(results, config)})


def hf(
    family: Annotated[
        list[str] | None, typer.Option(help="Family of models to time; repeatable. All that are there when absent.")
    ] = None,
    size: Annotated[str, typer.Option(help="Size to time: tiny, layer (one of a 0.6 B model), or all.")] = "all",
    device: On = Device.cpu,
    dtype: Inputs = None,
    repeats: Repeats = None,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time transformers' own hybrid models as they come and after `fastweights.hf.accelerate`.

    The delta rule alone, the layer around it, and a model that reads, trains and generates: forward (prefill),
    forward+backward (a training step) and tokens per second of decoding. Nothing is reported unless both sides give the
    same outputs, gradients and tokens.

    For example: `fastweights bench hf --family qwen3-next --size layer`
    """
    path = _start("bench hf", device, "hf", smoke, json)
    need("bench hf", "hf", "transformers")
    import torch

    from fastweights.bench import hf as bench_hf
    from fastweights.bench import report

    for each in family or ():
        if each not in bench_hf.FAMILIES:
            raise FastWeightError(f"--family is {each!r}; expected one of {', '.join(bench_hf.FAMILIES)}")
    if size not in ("all", *bench_hf.SIZES):
        raise FastWeightError(f"--size is {size!r}; expected one of {', '.join(bench_hf.SIZES)}, or all")
    families, kind = family or list(bench_hf.FAMILIES), getattr(torch, _dtype(dtype, device))
    sizes = bench_hf.SMOKE if smoke else {n: s for n, s in bench_hf.SIZES.items() if size in ("all", n)}
    with _agreeing(len(families) * len(sizes)) as advance:
        found = bench_hf.run(families, sizes, device, kind, repeats or (2 if smoke else 10), advance)
    bench_hf.show(*found, sizes, device, kind, Console())
    _write(path, report.payload(device) | {"hf": bench_hf.payload(*found, sizes, kind)})


def lab(repeats: Repeats = None, smoke: Smoke = False, json: Json = None) -> None:
    """Time training steps of the overwriting experiment beside the published algorithm, a loop over tokens.

    Both draw the same kind of batches and must have the same loss and gradients before any time is reported.

    For example: `fastweights bench lab --repeats 20`
    """
    path = _start("bench lab", "cpu", "lab", smoke, json)
    from fastweights.bench import lab as bench_lab
    from fastweights.bench import report

    samples = repeats or (2 if smoke else 10)
    with _agreeing(2 * samples) as advance:
        result = bench_lab.run(samples, advance, **(bench_lab.SMOKE if smoke else {}))
    bench_lab.show(result, Console())
    _write(path, report.payload("cpu") | {"lab": bench_lab.payload(result)})
