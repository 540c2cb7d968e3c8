"""`fastweights bench lm`, `train`, `decode` and `hf`: whole models, as they read, learn and write."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fastweights.cli.bench_options import Device, Inputs, Json, On, Repeats, Smoke, agreeing, dtype_of, start, write
from fastweights.cli.options import need, say
from fastweights.core import FastWeightError
from fastweights.files import write_json


def lm(
    repeats: Repeats = None,
    smoke: Smoke = False,
    picture: Annotated[
        Path | None, typer.Option(help="Picture of time against length; beside the numbers when absent.")
    ] = None,
    json: Json = None,
) -> None:
    """Time the language model on a CPU: a training step, and the reading of longer and longer documents.

    The step is timed beside the same model with Hugging Face's delta rule in place of ours, and gated-delta also beside
    Hugging Face's own model of the same sizes, Qwen3-Next without softmax layers or experts. All start from the same
    weights, and nothing is reported unless their losses agree.

    For example: `fastweights bench lm --repeats 20`
    """
    device = Device.cpu
    path = start("bench lm", device, "lm", smoke, json)
    from fastweights.bench import lm as bench_lm
    from fastweights.bench import report

    settings, lengths = (bench_lm.SMOKE_TRAIN, bench_lm.SMOKE_LENGTHS) if smoke else (bench_lm.TRAIN, bench_lm.LENGTHS)
    samples = repeats or (2 if smoke else 10)
    rounds = min(3, samples)
    with agreeing(1 + 2 * rounds * len(lengths)) as advance:
        advance("training", 0)
        trainings = bench_lm.training(settings, samples)
        advance("training", 1)
        readings = bench_lm.reading(lengths, rounds, bench_lm.SMOKE_READ if smoke else {}, advance)
    bench_lm.show(trainings, readings, Console())
    picture = picture or path.with_suffix(".png")
    if bench_lm.plot(readings, picture):
        say(f"Drawn in {picture}")
    write(path, report.payload(device) | {"lm": bench_lm.payload(trainings, readings)})


def train(
    size: Annotated[
        list[str] | None,
        typer.Option(
            help='Size to time: "0.9 M", "8 x 512" or "12 x 768"; repeatable. All three when absent. paper-small and '
            "paper-medium are the paper's models."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Mixer of every block; repeatable. gated-delta and transformer, or a paper's, when absent."),
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="Output layer: linear or fwl; repeatable. Both, or a paper's, when absent.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=3, help="Words of the vocabulary.")] = 257,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens per row; the size's own when absent.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows per step; the size's own when absent.")] = None,
    profile: Annotated[bool, typer.Option(help="Print what each part of a step costs.")] = True,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Time FLA's layer of the same kind too; its first step tunes itself for minutes."),
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or PyTorch's profiler prints when it starts and stops
    path = start("bench train", device, "train", smoke, json)
    from fastweights.bench import report
    from fastweights.bench import train as bench_train

    # A misspelt size is said before anything is built.
    sizes = bench_train.SMOKE if smoke else bench_train.SIZES | bench_train.PAPER
    if unknown := [each for each in size or () if each not in sizes]:
        raise FastWeightError(f"--size is {unknown[0]!r}; expected one of {', '.join(map(repr, sizes))}")
    if peers and find_spec("fla") is None:
        raise FastWeightError("--peers needs flash-linear-attention, which is not installed")
    rows = {name: value for name, value in (("length", length), ("batch", batch)) if value}
    named = size or [name for name in sizes if name not in bench_train.PAPER]
    sizes = {name: settings | rows for name, settings in sizes.items() if name in named}
    done: list[bench_train.Result] = []

    def told(r: bench_train.Result) -> None:  # minutes may lie between two: what is there is kept
        done.append(r)
        write_json(path, report.payload(device) | {"train": bench_train.payload(done, vocab)})
        rate = f"{r.tokens_per_second:,.0f} tokens/s, {100 * r.share_of_peak:.1f} % of matrix peak"
        say(f"{r.size}, {r.model}, {r.head}, {r.how}: {rate}, ready after {r.ready:.1f} s")

    asked = bench_train.cases(sizes, model, head, device, peers)
    with agreeing(len(asked)) as advance:
        steps = repeats or (3 if smoke else 9)
        how = dict(repeats=steps, profile=profile, advance=advance, tell=told, leave=say)
        results = bench_train.run(asked, vocab, device, **how)
    bench_train.show(results, device, Console())
    say(f"Written to {path}")


def decode(
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a prompt to write after; repeatable. Without it, many texts at once."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Mixer of every block, with --context; repeatable. gated-delta and transformer when absent."),
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="Output layer, with --context: linear or fwl; repeatable.")
    ] = None,
    size: Annotated[str, typer.Option(help='Size, with --context: "0.9 M", "16 x 128" or "12 x 768".')] = "12 x 768",
    vocab: Annotated[int, typer.Option(min=3, help="Words of the vocabulary, with --context.")] = 16_384,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print what each part of a token costs, step by step, with --context.")
    ] = False,
    device: On = Device.cpu,
    smoke: Smoke = False,
    json: Json = None,
) -> None:
    """Count the tokens per second that models write, on a GPU also as a CUDA graph.

    Without `--context`, a model of 16 blocks writes many texts at once. With it, models read a prompt of so many tokens
    and go on with it: seconds to the first token, what is kept of the prompt, and tokens per second after it. A
    transformer looks back at all of the prompt.

    A CUDA graph records the launches of one step and replays them without the host. Where transformers is installed,
    its `generate` writes with the same weights, by our loop and by its own. All ways must write the same tokens.

    For example: `fastweights bench decode --device cuda --context 1024 --context 1048576 --model gated-delta`
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as in `train`
    path = start("bench decode", device, "decode", smoke, json)
    from fastweights.bench import decode as bench_decode
    from fastweights.bench import report

    if size not in bench_decode.SIZES:
        raise FastWeightError(f"--size is {size!r}; expected one of {', '.join(map(repr, bench_decode.SIZES))}")
    tokens = 2 if smoke else 100 if device == Device.cuda else 10
    if context:
        shape = bench_decode.SMOKE_SIZE if smoke else bench_decode.SIZES[size]
        asked = bench_decode.prompts(model or bench_decode.MODELS, head or ("linear",), context, shape)
        with agreeing(len(asked)) as advance:
            how = dict(tokens=4 * tokens, advance=advance, vocab=vocab, profile=profile)
            found = bench_decode.after_prompts(asked, device, **how)
        bench_decode.show_prompts(found, "smoke" if smoke else size, device, Console())
        write(path, report.payload(device) | {"decode": bench_decode.prompts_payload(found, size, vocab)})
        return
    # Several numbers of texts at once: one text is bound by launches, many by arithmetic.
    config = bench_decode.SMOKE if smoke else bench_decode.FULL
    batches = bench_decode.BATCHES[:1] if smoke else bench_decode.BATCHES
    with agreeing(len(batches)) as advance:
        results = bench_decode.run(config, batches, device, tokens=tokens, advance=advance)
    bench_decode.show(results, config, device, Console())
    write(path, report.payload(device) | {"decode": bench_decode.payload(results, config)})


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
    path = start("bench hf", device, "hf", smoke, json)
    need("bench hf", "hf", "transformers")
    import torch

    from fastweights.bench import hf as bench_hf
    from fastweights.bench import hf_models, hf_results, report

    for each in family or ():
        if each not in hf_models.FAMILIES:
            raise FastWeightError(f"--family is {each!r}; expected one of {', '.join(hf_models.FAMILIES)}")
    if size not in ("all", *hf_models.SIZES):
        raise FastWeightError(f"--size is {size!r}; expected one of {', '.join(hf_models.SIZES)}, or all")
    # Families that this version of transformers has not are left out, and the output says so.
    families, kind = family or list(hf_models.FAMILIES), getattr(torch, dtype_of(dtype, device))
    sizes = hf_models.SMOKE if smoke else {n: s for n, s in hf_models.SIZES.items() if size in ("all", n)}
    with agreeing(len(families) * len(sizes)) as advance:
        found = bench_hf.run(families, sizes, device, kind, repeats or (2 if smoke else 10), advance)
    hf_results.show(*found, sizes, device, kind, Console())
    write(path, report.payload(device) | {"hf": hf_results.payload(*found, sizes, kind)})
