"""The stage `score`: all ways to read a page, which are the arms of the experiment."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import side_by_side
import torch
from model import layer_file
from scorer import Scorer

SEGMENT = 64  # tokens between two updates of dynamic evaluation
EPS = 1e-4  # added to the root mean square of gradients, by which the rule "rms" divides
LAYER = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")  # weights of the layer that learn
OUTPUT = "model.embedding.weight"  # the output embedding, which is tied to that of the inputs
# Rates to try first, by what dynamic evaluation trains: for the rules "sgd" and "rms"
FIRST_RATES = {"block": (1.0, 8e-4), "output": (1.0, 4e-4), "both": (1.0, 4e-4), "all": (0.2, 2e-4)}
STARTED = time.perf_counter()


@dataclass
class Arm:
    """A way to read pages.

    Attributes:
        losses: from the tokens (T + 1,) of some pages to the losses (T,) of each.
        note: what was chosen for it, for the table.
        most: pages that are read at once, where it is fewer than --together.
    """

    losses: Callable
    note: str = ""
    most: int = 32


def arms(scorer):
    """{name: function that makes the arm}, cheap arms first; of layers that `tune` trained, those that exist."""
    untrained, tuned = scorer.untrained_layer, scorer.tuned_layer

    def layer(make_layer, *settings, cache=False, **named):
        return partial(layer_arm, scorer, partial(make_layer, *settings, **named), cache)

    makers = {
        "static": lambda: Arm(scorer.static),
        "memory": lambda: Arm(scorer.not_learning),
        "cache": lambda: Arm(lambda rows: scorer.with_cache(rows, scorer.not_learning(rows))),
        "refresh-64": layer(untrained, 64),
        "refresh-16": layer(untrained, 16),
        "refresh-256": layer(untrained, 256),
        "cumulative-64": layer(untrained, 64, "cumulative"),
        "cache-refresh-64": layer(untrained, 64, cache=True),
    }
    for refresh in (64, 16, 256, 0):
        if layer_file(scorer.args, refresh).exists():
            name = f"refresh-{refresh}-trained" if refresh else "published"
            makers[name] = layer(tuned, refresh)
            makers[f"{name}-not-learning"] = partial(not_learning_arm, scorer, partial(tuned, refresh))
            if refresh in (16, 64):
                makers[f"cache-{name}"] = layer(tuned, refresh, cache=True)
    trained_at_64 = layer_file(scorer.args, 64).exists()
    if trained_at_64:
        makers["refresh-16-trained-at-64"] = layer(tuned, 64, 16)
        makers["cache-refresh-16-trained-at-64"] = layer(tuned, 64, 16, cache=True)
        makers["cumulative-64-trained"] = layer(tuned, 64, 64, "cumulative")
    if layer_file(scorer.args, 64, long=True).exists():
        long = partial(tuned, 64, long=True)
        makers["refresh-64-trained-long"] = layer(long)
        makers["refresh-64-trained-long-not-learning"] = partial(not_learning_arm, scorer, long)
        makers["cache-refresh-64-trained-long"] = layer(long, cache=True)
        makers["refresh-16-trained-at-64-long"] = layer(long, refresh=16)
    for trained in (False, True) if trained_at_64 else (False,):
        for refresh in (64, 16):
            name = f"output-{refresh}{'-trained' if trained else ''}"
            makers[name] = partial(output_arm, scorer, name, refresh, trained, cache=False)
            makers[f"cache-{name}"] = partial(output_arm, scorer, name, refresh, trained, cache=True)
    for learned in FIRST_RATES:
        for rule in ("rms", "sgd"):
            name = f"dynamic-{learned}-{rule}"
            makers[name] = partial(dynamic_arm, scorer, name, learned, rule)
    return makers


def layer_arm(scorer, make_layer, cache):
    """The arm of a layer that learns from the page, with a neural cache beside it or without.

    Args:
        scorer: of the body.
        make_layer: makes the layer.
        cache: whether there is a cache.
    """
    layer = make_layer()

    def losses(rows):
        learning = scorer.learning(layer, rows)
        return scorer.with_cache(rows, learning) if cache else learning

    note = json.dumps({name: round(size, 7) for name, size in layer.step_sizes().items()})
    return Arm(losses, note, most=32 if layer.config.refresh else 4)


def not_learning_arm(scorer, make_layer):
    """The arm of a trained layer that learns nothing from the page: what its training gained by itself."""
    layer = make_layer()
    return Arm(lambda rows: scorer.not_learning(rows, layer))


def output_arm(scorer, name, refresh, trained, cache):
    """The arm of a layer beside an output embedding that learns too.

    Every row of the embedding has a step of its own, the smaller the larger its gradients were in training; the layer
    keeps its steps, or half of them.

    Args:
        scorer: of the body.
        name: of the choice of the rate.
        refresh: tokens between two updates.
        trained: whether the layer is the one that `tune` trained at every 64 tokens.
        cache: whether there is a neural cache.
    """
    args = scorer.args
    layer = scorer.tuned_layer(64, refresh) if trained else scorer.untrained_layer(refresh)
    module, sizes = side_by_side.LastLayer(scorer.model), layer.step_sizes()
    start = {f"model.fast.{n}": getattr(layer, n).detach() for n in LAYER}
    statistics = scorer.gradient_statistics("rms")
    row_sizes = statistics["embedding.weight"].mean(1, keepdim=True).sqrt() + EPS

    def losses_of(rows, rates, factors):
        factors = torch.tensor(factors, device=args.device)
        return side_by_side.score(
            module,
            [*start, OUTPUT],
            scorer.features_of(rows),
            scorer.labels_of(rows),
            torch.tensor(rates, device=args.device),
            torch.ones(len(rows), device=args.device),
            divide={OUTPUT: row_sizes},
            steps={f"model.fast.{n}": sizes[n] * factors for n in LAYER},
            start=start,
            segment=refresh,
            most=args.together,
        )

    rate, factor = scorer.choose_pair(name, 2e-4, (1.0, 0.5), losses_of)

    def losses(rows):
        learning = losses_of(rows, [rate] * len(rows), [factor] * len(rows))
        return scorer.with_cache(rows, learning) if cache else learning

    return Arm(losses, f"rate {rate:.3g}, layer's steps times {factor:g}")


def dynamic_arm(scorer, name, learned, rule):
    """The arm of dynamic evaluation, memory carried.

    Args:
        scorer: of the body.
        name: of the choice of the rate.
        learned: "all" weights; or, on features that are read once, those of the "block" (the layer), of the "output"
            embedding, or of "both". The embedding of the inputs then stays as it is.
        rule: "sgd" or "rms".
    """
    args, whole = scorer.args, learned == "all"
    statistics = scorer.gradient_statistics(rule)
    divide = None if statistics is None else {f"model.{n}": x.sqrt() + EPS for n, x in statistics.items()}
    module = side_by_side.WholeModel(scorer.model) if whole else side_by_side.LastLayer(scorer.model)
    layer = [f"model.fast.{n}" for n in LAYER]
    everything = [n for n, _ in module.named_parameters() if not n.endswith("steps")]
    names = {"block": layer, "output": [OUTPUT], "both": [*layer, OUTPUT], "all": everything}[learned]

    def losses_of(rows, rates, clips):
        inputs = scorer.tokens_of(rows) if whole else scorer.features_of(rows)
        rates, clips = (torch.tensor(x, device=args.device) for x in (rates, clips))
        labels = scorer.labels_of(rows)
        return side_by_side.score(
            module, names, inputs, labels, rates, clips, divide=divide, segment=SEGMENT, most=args.together
        )

    first_rate = FIRST_RATES[learned][rule == "rms"]
    clips = (1.0,) if (learned, rule) == ("all", "rms") else (1.0, math.inf)  # without a clip the former diverged
    rate, clip = scorer.choose_pair(name, first_rate, clips, losses_of)
    return Arm(lambda rows: losses_of(rows, [rate] * len(rows), [clip] * len(rows)), f"rate {rate:.3g}, clip {clip:g}")


def score(args):
    """Score the pages in every arm that --arms names, arm by arm, until the minutes are over.

    losses/ARM/PAGE.npy has the losses of a page and, as its last number, the seconds that the page took.
    """
    scorer = Scorer(args)
    if args.wait:
        scorer.features_of([scorer.pages.page(i) for i in scorer.pages.test])
        while not (scorer.folder / f"layer-{args.wait}.safetensors").exists():
            time.sleep(0.1)
    for name, make_arm in arms(scorer).items():
        if args.arms and not any(fnmatchcase(name, pattern) for pattern in args.arms):
            continue
        target = scorer.folder / "losses" / name
        target.mkdir(parents=True, exist_ok=True)
        missing = [i for i in scorer.pages.test[args.worker :: args.workers] if not (target / f"{i}.npy").exists()]
        if missing and not _score_arm(args, scorer, make_arm(), name, missing, target):
            print(f"time is over in {name}; run again to go on")
            return


def _score_arm(args, scorer, arm, name, pages, target):
    """Score pages in one arm, pages of similar length side by side; whether that ended before the minutes were over.

    Args:
        args: of the command line.
        scorer: of the body.
        arm: the arm.
        name: of the arm.
        pages: numbers of the pages.
        target: folder for the losses.
    """
    (target / "note.txt").write_text(arm.note)
    start, tokens = time.perf_counter(), 0
    pages = sorted(pages, key=lambda i: len(scorer.pages.page(i)))
    size = min(args.together, arm.most)
    for first in range(0, len(pages), size):
        if time.perf_counter() - STARTED > 60 * args.minutes:
            return False
        batch = pages[first : first + size]
        rows, batch_start = [scorer.pages.page(i) for i in batch], time.perf_counter()
        losses = [x.float().cpu().numpy() for x in arm.losses(rows)]
        seconds = (time.perf_counter() - batch_start) / len(batch)
        for i, loss in zip(batch, losses, strict=True):
            tokens += len(loss)
            part = target / f"{i}.part.npy"
            np.save(part, np.r_[loss, seconds].astype(np.float32))
            part.rename(target / f"{i}.npy")
    print(f"{name}: {tokens:,} tokens in {time.perf_counter() - start:.1f} s", flush=True)
    return True
