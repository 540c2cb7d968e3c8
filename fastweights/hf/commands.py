"""What the program's commands for models of the ecosystem do, without their flags."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastweights.core import FastWeightError
from fastweights.files import read_json, read_tensors, write_json, write_tensors
from fastweights.hf import scoring
from fastweights.hf.attach import attach, load_attached, save_attached
from fastweights.hf.export import export
from fastweights.hf.head_training import Adapting, HeadTrainer
from fastweights.hf.loading import load_model, read_file, read_text, row_of
from fastweights.hf.scoring import Reading, call_body
from fastweights.text import corpus, report
from fastweights.text.scores import Text, summary
from fastweights.torch.dynamic import GradientStatistics

PROGRESS, OPTIMIZER = "adapt.json", "adapt.safetensors"
STATISTICS = 24  # windows of training text, for the step of each weight in dynamic evaluation


def export_run(run: Path, target: Path, *, last: bool) -> None:
    model = export(run, target, last=last)
    parameters = sum(p.numel() for p in model.parameters())
    _say(f"{target}: {parameters:,} parameters. Load with: import fastweights.hf; "
         f"AutoModelForCausalLM.from_pretrained({str(target)!r})")  # fmt: skip


def adapt(path: Path, data: str, out: Path, how: Adapting, *, size: int, mode: str, decay: float, save_every: int,
          resume: bool, device: str) -> None:  # fmt: skip
    console = Console()
    if (out / PROGRESS).exists() and not resume:
        raise FastWeightError(f"{out} exists; expected a new folder, or --resume to go on with it")
    if resume and not (out / PROGRESS).exists():
        raise FastWeightError(f"{out} has no {PROGRESS}; expected a folder that `fastweights adapt` began")
    model, tokenizer = load_model(path, device=device)
    if resume:
        about = read_json(out / PROGRESS, "a folder that `fastweights adapt` began")
        load_attached(model, out)
        how, data = Adapting(**about["how"]), about["data"]
    else:
        torch.manual_seed(how.seed)
        attach(model, size or None, mode=mode, decay=decay)
        about = dict(data=data, step=0, history=[])
    documents = [row_of(tokenizer, text)[0].numpy() for text in _documents(tokenizer, data)]
    trainer = HeadTrainer(model, documents, how)
    if resume:
        _restore(trainer, out, about)
    tokens = sum(map(len, documents))
    new = sum(p.numel() for p in model.fast_head.parameters())
    _say(f"{out}: a head of {new:,} parameters for {path}; {len(documents):,} documents, {tokens:,} tokens")
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=how.steps, completed=trainer.at)
        recent: list[tuple[float, float]] = []
        while trainer.at < how.steps:
            recent.append(trainer.step())
            if not all(np.isfinite(recent[-1])):
                raise FastWeightError(
                    f"the loss is {recent[-1][0]} at step {trainer.at}; expected a number: lower --lr"
                )
            loss, without = np.mean(recent[-20:], 0)
            text = f"loss {loss:.3f}  without the head {without:.3f}"
            progress.update(task, completed=trainer.at, description=text)
            if trainer.at % save_every == 0 or trainer.at == how.steps:
                about["history"].append(dict(step=trainer.at, loss=float(loss), without=float(without)))
                _save(trainer, out, about)
                console.print(f"step {trainer.at:>6}   {text}", highlight=False)
    _say(f"Next: fastweights eval --hf {path} FILES --head {out} --window {how.window}")


def _save(trainer: HeadTrainer, out: Path, about: dict[str, Any]) -> None:
    save_attached(trainer.model, out)
    slots = trainer.optimizer.state_dict()["state"]
    tensors = {f"{i}.{name}": torch.as_tensor(x) for i, values in slots.items() for name, x in values.items()}
    write_tensors(out / OPTIMIZER, tensors, dict(step=str(trainer.at)))
    how = {f: getattr(trainer.how, f) for f in trainer.how.__dataclass_fields__}
    write_json(out / PROGRESS, about | dict(step=trainer.at, how=how))


def _restore(trainer: HeadTrainer, out: Path, about: dict[str, Any]) -> None:
    """The optimiser and the place in the documents; what the head knew of them is forgotten."""
    trainer.skip(about["step"])
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, x in read_tensors(out / OPTIMIZER)[0].items():
        i, _, slot = name.partition(".")
        slots.setdefault(int(i), {})[slot] = x
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict() | dict(state=slots))


def evaluate(
    path: Path, files: list[Path], *, modes: list[str], head: Path | None, window: int, stride: int, lr: float,
    parameters: tuple[str, ...], statistics: str, limit: int, json: Path | None, picture: Path | None, device: str,
) -> None:  # fmt: skip
    console = Console()
    if not files:
        raise FastWeightError("no files are named; expected texts to score: --hf knows of no held-out documents")
    how = Reading(window=window, stride=stride, lr=lr, parameters=parameters)
    model, tokenizer = load_model(path, device=device)
    texts = [read_file(tokenizer, file, limit) for file in files]
    if statistics:
        how = replace(how, statistics=_statistics(model, tokenizer, statistics, window))
    if head is not None:
        load_attached(model, head)
    asked = modes or scoring.modes(model)
    scores, peaks = [], []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for mode in asked:
            task = progress.add_task(report.LABELS.get(mode, mode), total=sum(len(t.data) for t in texts))
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            scores.append(scoring.score(model, tokenizer, texts, mode, how, advance=partial(progress.advance, task)))
            peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
    found = summary(texts, scores, None)
    for row, peak in zip(found["modes"], peaks, strict=True):
        row["peak_gpu_bytes"] = peak
    report.show(found, console)
    json, picture = json or Path(f"{path.name}.eval.json"), picture or Path(f"{path.name}.eval.png")
    settings = dict(window=window, stride=stride, lr=lr, parameters=list(parameters), head=head and str(head))
    write_json(json, found | dict(model=str(path), settings=settings))
    drawn = report.plot(scores, texts, None, picture)
    _say(
        f"Written to {json} and {picture}" if drawn else f"Written to {json} (no picture: matplotlib is not installed)"
    )


def _documents(tokenizer: Any, data: str) -> list[Text]:
    found = [read_text(tokenizer, d.name, d.data) for d in corpus.documents(data)]
    if not found:
        raise FastWeightError(f"data is {data!r}, which holds no text; expected at least one file that is not empty")
    return found


def _statistics(model: Any, tokenizer: Any, data: str, window: int) -> GradientStatistics:
    """Of windows of training text, the same each time."""
    documents = [row_of(tokenizer, text) for text in _documents(tokenizer, data)]
    rng, rows = np.random.default_rng(0), []
    for _ in range(STATISTICS):
        row = documents[int(rng.integers(len(documents)))]
        at = int(rng.integers(max(1, row.shape[1] - window)))
        rows.append(row[:, at : at + window + 1].to(model.device))
    return GradientStatistics.collect(model, rows, call=call_body)


def _say(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
