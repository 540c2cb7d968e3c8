"""The training loop: it goes on from any step as if it had never stopped."""

import math
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.models import run_folder
from fastweights.models.compiled import compile_blocks, decide
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel, State
from fastweights.text.corpus_files import Corpus
from fastweights.torch.devices import matrix_peak
from fastweights.torch.learning.training_loss import WALK_DEVICES, unfit
from fastweights.torch.tree import map_tensors
from fastweights.training import checkpoints, log
from fastweights.training.batches import Ahead, Batches
from fastweights.training.gradients import CapturedGradients, Gradients
from fastweights.training.gradients import refuses as uncaptured
from fastweights.training.objective import Objective, to_batch
from fastweights.training.optimizer import make_optimizer, share_of_rate
from fastweights.training.parallel import Ranks

VALID_TOKENS = 32_768
START: dict[str, Any] = dict(step=0, seconds=0.0, best=math.inf)
WARM = 4  # steps on a GPU until all is compiled, captured and replayed once
AHEAD = 1  # steps that are queued on the device before the loss of an earlier one is waited for


class Trainer:
    """The loop and what it needs: batches, an empty state, and whether products are bfloat16."""

    def __init__(self, config: Config, run: Path, corpus: Corpus, model: LanguageModel, ranks: Ranks):
        self.config, self.run, self.corpus, self.model, self.ranks = config, run, corpus, model, ranks
        rows = config.batch * config.accumulate * ranks.world
        self.batches = Batches(corpus.splits["train"], rows, config.length, config.seed, config.context == "carried")
        self.bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and ranks.device != "cpu")
        self.autocast = torch.autocast(ranks.device.partition(":")[0], torch.bfloat16, enabled=self.bf16)
        with self.autocast:
            self.empty = model.init_state(config.batch)
        self.how = decide(config, ranks.device)
        self.ahead = Ahead(self.prepared) if ranks.device.startswith("cuda") else self.prepared

    def start(self, resume: bool = False) -> tuple[list[State], dict[str, Any]]:
        """Make ready what a step needs; the carried states and the position to go on from."""
        c = self.config
        states, at, known = checkpoints.restore(self.run, self.model, self.ranks) if resume else ([], START, {})
        if self.how.compiled:
            compile_blocks(self.model)  # first of all: it starts processes, which take their time
        if not resume:
            self.start_steps()
        objective = Objective(self.model)
        self.objective = self.ranks.wrap(objective)
        layer = None if self.model.fast is None else self.model.fast.config
        reason = uncaptured(c, layer, self.how, self.ranks.device)
        if reason:
            self.gradients = Gradients(self.objective, self.autocast, reason)
        else:
            self.gradients = CapturedGradients(objective, self.autocast)
        self.optimizer = make_optimizer(self.model, c)
        if resume:
            checkpoints.restore_optimizer(known, self.optimizer)
        return states, at

    def go(self, resume: bool, console: Console | None) -> None:
        """Train until the steps or minutes are over, or until someone interrupts; checkpoints are written on the
        way.
        """
        c, ranks = self.config, self.ranks
        states, at = self.start(resume)
        step, best, before, began = at["step"], at["best"], at["seconds"], time.perf_counter()
        lines = log.Log(self.run, run_folder.METRICS, step, c.steps, self.corpus.bytes_per_token, console, ranks.first)
        lines.say(f"On {self.machine()}: blocks {self.how}; steps {self.gradients}{self.fast_form()}")
        tokens, first = len(self.batches[0]) * c.length, WARM if ranks.device.startswith("cuda") else 0
        clock = log.Clock(tokens, self.flop_per_token(), ranks.world * self.peak(), first)
        done, waiting = self.done(step, before), list[tuple[int, Tensor]]()
        if done >= 1:
            lines.say(f"Nothing is left to train: step {step} was the last.")
        with lines, interruptible() as signals:
            # `done` is the share of the run behind us: all processes go by the first one's clock.
            while done < 1:
                loss, states = self.step(step, share_of_rate(c, step, done), states)
                step = step + 1
                clock.count()
                if clock.ready:
                    lines.say(f"Ready: the first {first} steps took {clock.ready:.1f} s; speeds are of later ones")
                seconds = before + time.perf_counter() - began
                done, stopped = ranks.sum(self.done(step, seconds) if ranks.first else 0.0, len(signals))
                waiting.append((step, loss))
                # Validate and save now and then, at the end, and when someone wants to stop.
                pause = step % c.eval_every == 0 or done >= 1 or stopped
                while len(waiting) > (0 if pause else AHEAD):
                    values = self.report(lines, *waiting.pop(0), done, clock)
                    if waiting or not pause:
                        lines.point(**values)
                if not pause:
                    continue
                speed = clock.values()
                with clock.stopped():
                    valid = self.validate()
                    values |= dict(valid_loss=valid, valid_bits_per_byte=lines.bits(valid))
                    lines.point(**values | speed | self.step_sizes() | dict(ran=self.ran))
                    if valid < best:
                        checkpoints.save_best(self.run, self.model, step, ranks)
                    best = min(best, valid)
                    about = dict(step=step, seconds=seconds, best=best)
                    checkpoints.save_last(self.run, self.model, self.optimizer, states, about, ranks)
                if stopped and done < 1:
                    again = shlex.join(["fastweights", "train", str(self.run), "--resume"])
                    lines.say(f"Stopped and saved at step {step}. Go on with: {again}")
                    return

    def report(self, lines: log.Log, step: int, loss: Tensor, done: float, clock: log.Clock) -> dict[str, Any]:
        """What is logged of a step, whose loss is waited for."""
        mean = self.ranks.sum(float(loss))[0]
        lines.step(step, done, mean, clock.values())
        if not math.isfinite(mean):
            raise FastWeightError(
                f"the loss is {mean} at step {step}; expected a number: try a smaller --lr, and "
                "fastweights.debug(model) to learn which layer met it first"
            )
        return dict(step=step, loss=mean, bits_per_byte=lines.bits(mean))

    @property
    def ran(self) -> str:
        """One word for how steps run: "eager", "compiled", or "captured" where compiled ones are a CUDA graph."""
        return self.how.name if self.gradients.reason else "captured"

    def machine(self) -> str:
        """The device and the dtype of the products, to log."""
        device = self.ranks.device
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
        return f"{name}, {'bfloat16' if self.bf16 else 'float32'}"

    def fast_form(self) -> str:
        """How the Fast Weight Layer is trained, to log; nothing where there is none."""
        if self.model.fast is None:
            return ""
        device = self.ranks.device.partition(":")[0]
        if reason := unfit(self.model.fast.config, device, self.config.length):
            return f"; Fast Weight Layer with weights per document, eager ({reason})"
        form = (
            "with weights per row, by hand" if device in WALK_DEVICES else "by products with earlier tokens, captured"
        )
        return f"; Fast Weight Layer {form}"

    def flop_per_token(self) -> int:
        """Of a training step: 6 per parameter that is trained. The memory's own arithmetic is not counted."""
        return 6 * sum(p.numel() for p in self.model.parameters())

    def peak(self) -> float:
        """FLOP per second of a large product in the dtype of the run."""
        return matrix_peak(self.ranks.device, torch.bfloat16 if self.bf16 else torch.float32)

    def start_steps(self) -> None:
        """The first steps of a refreshed Fast Weight Layer, from the first batch; the same in every process."""
        if self.model.fast is None or not self.config.refresh:
            return
        rows, device = self.batches[0][:8], self.ranks.device
        even = self.how.compiled and device.startswith("cuda")
        tokens, _, _, documents = to_batch(rows, self.model.vocab - 1, device, even=even)
        if documents.even is None:
            with torch.no_grad(), self.autocast:
                x, _ = self.model(tokens, None, documents)
        else:  # as steps will be, but for the compiler, so that no other kernels are needed for this
            state = map_tensors(lambda x: x[: len(rows)], self.empty)
            with self.autocast:
                x, _ = self.model(tokens, state, documents.even)
        self.model.fast.start_steps(x.detach().float(), self.config.fast_step)

    def step_sizes(self) -> dict[str, float]:
        """The Fast Weight Layer's steps, to log."""
        if self.model.fast is None or self.config.parallel == "fsdp":
            return {}
        return {f"step_{name}": size for name, size in self.model.fast.step_sizes().items()}

    def done(self, step: int, seconds: float) -> float:
        """The share of the run that is behind us, by steps or by time."""
        c = self.config
        return max(step / c.steps, seconds / 60 / c.minutes if c.minutes else 0.0)

    def prepared(self, step: int) -> tuple[float, list]:
        """The tokens of a step that are labels, in all processes, and this process's batches, still on the CPU."""
        c, ranks = self.config, self.ranks
        rows = self.batches[step]
        weight = float((rows[:, 1:] != self.model.vocab - 1).sum())
        forget = np.random.default_rng([c.seed, step]).random(len(rows)) < c.forget
        parts = []
        for i in range(c.accumulate):
            at = (i * ranks.world + ranks.rank) * c.batch
            parts.append((rows[at : at + c.batch], forget[at : at + c.batch]))
        return weight, parts

    def step(self, step: int, rate: float, states: list[State]) -> tuple[Tensor, list[State]]:
        """One step of the optimiser: this process's part of the loss per token before it, and the states to carry on.

        Nothing in it waits for the device.

        Args:
            step: its number, which decides the batch, dropout and which rows forget.
            rate: share of the peak learning rates.
            states: carried memory of each accumulated batch.
        """
        c, ranks = self.config, self.ranks
        torch.manual_seed((c.seed * 1_000_003 + step) * ranks.world + ranks.rank)  # dropout
        if not self.model.training:
            self.model.train()
        weight, parts = self.ahead(step)
        # Memory is carried from step to step, unless documents were shuffled anew or windows are read by themselves.
        if c.context == "packed" or self.batches.starts_epoch(step) or not states:
            states = [self.empty] * c.accumulate
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        self.optimizer.zero_grad(set_to_none=True)
        total, after = torch.zeros((), dtype=torch.float64, device=ranks.device), list[State]()
        # Accumulated batches: gradients add up, each with its own carried memory.
        for (rows, forget), state in zip(parts, states, strict=True):
            batch = to_batch(rows, self.model.vocab - 1, ranks.device, forget, even=self.how.compiled)
            loss, state = self.gradients(batch, state, ranks.world / weight)  # processes are averaged
            total, after = total + loss, [*after, state]
        if c.clip:
            nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], c.clip)
        self.optimizer.step()
        return total / weight, after

    @torch.no_grad()
    def validate(self) -> float:
        """Loss per token on the validation documents, memory carried."""
        split, c = self.corpus.splits["valid"], self.config
        length = min(c.length, max(1, len(split.tokens) - 1))
        rows = max(1, min(c.batch, (len(split.tokens) - 1) // length))
        batches = Batches(split, rows, length, 0, True)
        self.model.eval()
        state, total, weight = map_tensors(lambda x: x[:rows], self.empty), 0.0, 0.0
        for i in range(min(batches.per_epoch, max(1, VALID_TOKENS // (rows * length)))):
            batch = to_batch(batches[i], self.model.vocab - 1, self.ranks.device)
            with self.autocast:
                _, loss, state = self.objective(*batch[:3], state, batch[3])
            total, weight = total + float(loss), weight + float(batch[2].sum())
        return total / max(1.0, weight)


@contextmanager
def interruptible() -> Iterator[list]:
    """A list that is empty until Ctrl-C or a polite kill; a second Ctrl-C stops at once."""
    stopped: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    try:
        before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        before = {}
    try:
        yield stopped
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
