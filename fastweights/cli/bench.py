"""The commands under `fastweights bench`: their flags and help. Light to import."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from fastweights.core import FastWeightError


class Rule(StrEnum):
    delta = "delta"
    sum = "sum"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


On = Annotated[Device, typer.Option(help="Where to run.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Samples; 10 when absent.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny sizes and 2 samples: does it run?")]
Json = Annotated[
    Path | None, typer.Option(dir_okay=False, writable=True, help="Where to write all numbers.", show_default=False)
]


class _DefaultsToMemory(TyperGroup):
    """`bench --flags` is `bench memory --flags`."""

    def parse_args(self, ctx, args):
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["memory", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=_DefaultsToMemory)


@bench.callback()
def bench_() -> None:
    """Time this library against the others, after checking that all compute the same.

    `fastweights bench` alone is `fastweights bench memory`; its flags: `fastweights bench memory --help`.

    For example: `fastweights bench --shape 1,2048,4,64 --rule delta`
    """


def _start(command: str, device: str, name: str, smoke: bool, json: Path | None) -> Path:
    """Where the numbers will go, once everything that could stop the work has been checked."""
    if not find_spec("torch"):
        raise FastWeightError(f"{command} needs PyTorch, which is not installed; pip install 'fastweights[torch]'")
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
    from fastweights.bench import report

    report.write(path, payload)
    Console().print(f"Written to {path}", highlight=False, markup=False, soft_wrap=True)


@bench.command()
def memory(
    shape: Annotated[list[str] | None, typer.Option(metavar="B,T,H,K[,V]", help="A shape to time; repeatable.")] = None,
    rule: Annotated[Rule | None, typer.Option(help="Both when absent.")] = None,
    features: Annotated[
        str, typer.Option(help="Map queries and keys of every shape first, such as dpfp-3; all in the clock.")
    ] = "identity",
    norm: Annotated[str, typer.Option(help="Of the features: none, sum or l2.")] = "none",
    method: Annotated[
        list[str] | None, typer.Option(help="Our method to time; repeatable. All but the loop over tokens when absent.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="A peer to time, such as FLA; repeatable. All installed when absent.")
    ] = None,
    device: On = Device.cpu,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the inputs; float32 on the CPU and bfloat16 on a GPU when absent.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Samples per contestant; 20 when absent (5 with --length-scaling).")
    ] = None,
    softmax: Annotated[bool, typer.Option("--softmax", help="Time causal softmax attention too.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny shapes and 2 samples: does it run?")] = False,
    length_scaling: Annotated[
        bool, typer.Option("--length-scaling", help="Instead: time and memory at (1, T, 4, 64) as T doubles.")
    ] = False,
    json: Json = None,
) -> None:
    """Time the memory, forward and forward+backward.

    Contestants take turns. Outputs, states and gradients are first compared with float64; when one deviates, nothing
    is reported and the exit code is 1. All numbers go to `benchmarks/<machine>-<commit>.json`.

    For example: `fastweights bench memory --rule sum --softmax --repeats 50`
    """
    path = _start("bench", device, "lengths" * length_scaling, smoke, json)
    from fastweights.bench import lengths, report
    from fastweights.bench import memory as bench_memory
    from fastweights.bench.case import parse_shape

    if length_scaling and (shape or softmax or (features, norm) != ("identity", "none")):
        raise FastWeightError("--length-scaling has shapes and contestants of its own; drop --shape, --softmax, "
                              "--features and --norm")  # fmt: skip
    dtype = dtype or (Dtype.bfloat16 if device == Device.cuda else Dtype.float32)
    rules = [rule.value] if rule else [r.value for r in Rule]
    if length_scaling:
        asked = lengths.cases(lengths.SMOKE if smoke else lengths.LENGTHS, rules, method or ["auto"], device, dtype)
        with _agreeing(lengths.STEPS * len(asked)) as advance:
            scalings = [lengths.run(*a, repeats=repeats or (2 if smoke else 5), advance=advance) for a in asked]
        report.show_lengths(scalings, Console())
        _write(path, report.payload(device, scalings=scalings))
        return
    shapes = [parse_shape(text) for text in shape or ()]
    shapes = shapes or list(bench_memory.SMOKE if smoke else bench_memory.SHAPES[device])
    cases = bench_memory.cases(shapes, rules, device, dtype, features, norm)
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


@bench.command()
def layers(
    name: Annotated[list[str] | None, typer.Option(help="A preset, or 'default'; repeatable. All when absent.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples; 20 when absent.")] = None,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Time layers beside their projections alone and their memory alone, forward+backward.

    For example: `fastweights bench layers --name default --name gated-deltanet`
    """
    path = _start("bench layers", "cpu", "layers", smoke, json)
    from fastweights.bench import layers as bench_layers
    from fastweights.bench import report

    for each in name or ():
        if each not in bench_layers.NAMES:
            raise FastWeightError(f"--name is {each!r}; expected one of {', '.join(bench_layers.NAMES)}")
    names = name or bench_layers.NAMES
    sizes = bench_layers.SMOKE if smoke else bench_layers.DEFAULT
    with _agreeing(len(names)) as advance:
        results = bench_layers.run(names, **sizes, repeats=repeats or (2 if smoke else 20), advance=advance)
    bench_layers.show(results, Console(), **sizes)
    _write(path, report.payload("cpu") | {"layers": bench_layers.payload(results, sizes)})


@bench.command()
def fwl(device: On = Device.cpu, repeats: Repeats = None, smoke: Smoke = False, json: Json = None) -> None:
    """Time a Fast Weight Layer: on a CPU a training step with and without it, on a GPU the block alone.

    For example: `fastweights bench fwl --device cuda`
    """
    path = _start("bench fwl", device, "fwl", smoke, json)
    from fastweights.bench import fwl as bench_fwl
    from fastweights.bench import report

    shapes = bench_fwl.SMOKE if smoke else bench_fwl.SHAPES[device]
    precisions = ["float32", "tf32", "bfloat16"] if device == Device.cuda else ["float32"]
    with _agreeing(len(shapes) * len(precisions)) as advance:
        results = bench_fwl.run(shapes, device, precisions, repeats or (2 if smoke else 10), advance)
    bench_fwl.show(results, device, Console())
    _write(path, report.payload(device) | {"fwl": bench_fwl.payload(results)})


@bench.command()
def lm(
    device: On = Device.cpu,
    repeats: Repeats = None,
    smoke: Smoke = False,
    picture: Annotated[
        Path | None, typer.Option(help="Where to draw time against length; beside the numbers when absent.")
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
        Console().print(f"Drawn in {picture}", highlight=False, markup=False, soft_wrap=True)
    _write(path, report.payload(device) | {"lm": bench_lm.payload(trainings, readings)})


@bench.command()
def decode(device: On = Device.cpu, smoke: Smoke = False, json: Json = None) -> None:
    """Count the tokens per second of a model of 16 blocks that writes many texts at once, on a GPU also as a graph.

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


@bench.command()
def lab(repeats: Repeats = None, smoke: Smoke = False, json: Json = None) -> None:
    """Time training steps of the overwriting experiment beside the published algorithm, a loop over tokens.

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
