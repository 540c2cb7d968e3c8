"""All ways to read a page: every token is scored before it is learned from."""

import json
import math
import time
from fnmatch import fnmatchcase
from itertools import product

import numpy as np
import side_by_side
import torch
from model import Pages, autocast, best_rate, features, folder, layer, load_body
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from fastweights.torch import GradientStatistics
from fastweights.torch.cache import NeuralCache

SEGMENT = 64  # of dynamic evaluation
EPS = 1e-4  # of its rule rms
LAYER = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")
OUTPUT = "model.embedding.weight"  # tied
STARTED = time.perf_counter()


class Arm:
    """A way to score pages.

    together: from the tokens of some pages to the losses (T,) of each;  note: what was chosen for it;  most: pages at
    once, where it is fewer than --together.
    """

    def __init__(self, name, together, note="", most=32):
        self.name, self.note, self.together, self.most = name, note, together, most


class Scorer:
    """All arms for one body."""

    def __init__(self, given):
        self.given, self.pages = given, Pages(given)
        self.model = load_body(given, self.pages)
        for p in self.model.parameters():
            p.requires_grad_(False)
        self.folder, self.seen = folder(given), {}

    def xs(self, rows):
        """Features (T, D) of each page, read in batches of pages of like length, and kept."""
        keys = [hash(row.tobytes()) for row in rows]
        new = {k: row for k, row in zip(keys, rows, strict=True) if k not in self.seen}
        order = sorted(new, key=lambda k: len(new[k]))
        for some in (order[a : a + 16] for a in range(0, len(order), 16)):
            width = len(new[some[-1]])
            read = features(self.given, self.model, np.stack([np.pad(new[k], (0, width - len(new[k]))) for k in some]))
            self.seen |= {k: x[: len(new[k]) - 1] for k, x in zip(some, read, strict=True)}
        return [self.seen[k] for k in keys]

    def labels(self, rows):
        return [torch.from_numpy(row[1:]).to(self.given.device) for row in rows]

    def padded(self, rows):
        """Features (B, T, D), labels (B, T) and which of them are real (B, T), of pages filled up to the longest."""
        x, labels = (pad_sequence(y, batch_first=True) for y in (self.xs(rows), self.labels(rows)))
        lengths = torch.tensor([[len(row) - 1] for row in rows], device=x.device)
        return x, labels, torch.arange(x.shape[1], device=x.device) < lengths

    def rate(self, name, start, score_at):
        """The best rate on validation pages, found once and kept."""
        path = self.folder / f"rate-{name}.json"
        if not path.exists():
            rows = [self.pages.page(i, self.given.tune_tokens) for i in self.pages.valid]
            mean = lambda rate: float(torch.cat(score_at(rate)(rows)).mean())  # noqa: E731
            path.write_text(json.dumps(best_rate(name, start, lambda r: min(1e9, mean(r)))))
        return json.loads(path.read_text())

    @torch.no_grad()
    def slow(self, rows, block=None):
        """Losses of the layer's weights as they are."""
        block, pairs = block or self.model.fast, zip(self.xs(rows), self.labels(rows), strict=True)
        return [block.slow_loss(x[None], y[None])[0] for x, y in pairs]

    @torch.no_grad()
    def static(self, rows):
        """Windows of the trained length, each read afresh."""
        n, found = self.given.length, []
        for row in rows:
            parts = [torch.from_numpy(row[at : at + n + 1]) for at in range(0, len(row) - 1, n)]
            part = pad_sequence(parts, batch_first=True).to(self.given.device)
            with autocast(self.given):
                losses = self.model.score(part[:, :-1], part[:, 1:], learn=False).loss
            found.append(losses.flatten()[: len(row) - 1])
        return found

    @torch.no_grad()
    def learned(self, block, rows):
        x, labels, real = self.padded(rows)
        losses = block.run(x, labels, real.float(), logits=False, slow=False).loss
        return [y[: len(row) - 1] for y, row in zip(losses, rows, strict=True)]

    def untrained(self, refresh, within="held"):
        """The body's layer as it is, with steps of the best common factor of 1 / mean |key|^2."""
        block = layer(self.given, self.model, refresh, within)
        block.start_steps(self.xs([self.pages.page(self.pages.valid[0], self.given.tune_tokens)])[0][None])
        first = block.steps.detach().clone()

        def at(rate):
            block.steps.data.copy_(first + math.log(rate))
            return lambda rows: self.learned(block, rows)

        name = f"refresh-{refresh}" if within == "held" else f"{within}-{refresh}"
        at(self.rate(name, 0.5, at))
        return block

    def tuned(self, trained, refresh=None, within="held", long=""):
        """The layer trained at every `trained` tokens; where it is refreshed at others, or otherwise, a factor of its
        steps is chosen."""
        refresh = trained if refresh is None else refresh
        block = layer(self.given, self.model, refresh, within)
        weights = load_file(self.folder / f"layer-{trained or 'sum'}{long}.safetensors")
        block.load_state_dict(weights | {"unembed": self.model.embedding.weight})
        if refresh != trained or within != "held":
            first = block.steps.detach().clone()

            def at(rate):
                block.steps.data.copy_(first + math.log(rate))
                return lambda rows: self.learned(block, rows)

            kind = "refresh" if within == "held" else within
            at(self.rate(f"{kind}-{refresh}-trained-at-{trained}{long}", 1.0, at))
        return block

    def with_output(self, refresh, trained, cache=False):
        """A layer beside an output embedding that learns too: every row has a step of its own, the smaller the larger
        its gradients were in training; the layer keeps its steps, or half of them."""
        block = self.tuned(64, refresh) if trained else self.untrained(refresh)
        module, sizes = side_by_side.Alone(self.model), block.step_sizes()
        start = {f"model.fast.{n}": getattr(block, n).detach() for n in LAYER}
        rows = self.divide("rms")["embedding.weight"].mean(1, keepdim=True).sqrt() + EPS

        def together(pages, rates, factors):
            at = lambda x: torch.tensor(x, device=self.given.device)  # noqa: E731
            return side_by_side.score(
                module, [*start, OUTPUT], self.xs(pages), self.labels(pages), at(rates), at([1.0] * len(pages)),
                divide={OUTPUT: rows}, start=start, segment=refresh, most=self.given.together,
                steps={f"model.fast.{n}": sizes[n] * at(factors) for n in LAYER},
            )  # fmt: skip

        def scored(pages):
            losses = together(pages, [rate] * len(pages), [factor] * len(pages))
            return self.cached(pages, losses) if cache else losses

        name = f"output-{refresh}" + "-trained" * trained
        rate, factor = self.choose(name, 2e-4, (1.0, 0.5), together)
        return Arm("cache-" * cache + name, scored, f"rate {rate:.3g}, layer's steps times {factor:g}")

    @torch.no_grad()
    def cached(self, rows, losses):
        """The same with a cache beside it, some pages at a time."""
        found = []
        for at in range(0, len(rows), 8):
            x, labels, real = self.padded(rows[at : at + 8])
            mixed, _ = NeuralCache(self.given.cache).score(
                x, labels, pad_sequence(losses[at : at + 8], batch_first=True), mask=real
            )
            found += [y[: len(row) - 1] for y, row in zip(mixed, rows[at : at + 8], strict=True)]
        return found

    def divide(self, rule):
        """What divides the gradients: nothing, or the root of their mean square over windows of training pages."""
        if rule == "sgd":
            return None
        rng, model = np.random.default_rng(0), self.model
        rows = [torch.from_numpy(self.pages.inside(rng, 1, min(512, self.given.length))) for _ in range(16)]
        model.requires_grad_(True)
        statistics = GradientStatistics.collect(model, [r.to(self.given.device) for r in rows], call=self.whole)
        model.requires_grad_(False)
        return statistics

    def whole(self, model, tokens, state):
        """The model as DynamicEvaluation calls it."""
        with autocast(self.given):
            logits, after = model.logits(tokens, state)
        return logits.float(), after._replace(fast=None)

    def dynamic(self, rule, which):
        """Dynamic evaluation of all weights, memory carried, or on features read once: of the layer's own weights,

        of the output embedding, or of both. The embedding of the inputs then stays as it is.
        """
        statistics, alone = self.divide(rule), which != "all"
        divide = None if statistics is None else {f"model.{n}": x.sqrt() + EPS for n, x in statistics.items()}
        module = side_by_side.Alone(self.model) if alone else side_by_side.Whole(self.model)
        names = [n for n, _ in module.named_parameters() if not n.endswith("steps")]
        if alone:
            block = [f"model.fast.{n}" for n in LAYER]
            names = dict(block=block, output=[OUTPUT], both=[*block, OUTPUT])[which]

        def together(rows, rates, clips):
            at = lambda x: torch.tensor(x, device=self.given.device)  # noqa: E731
            inputs = self.xs(rows) if alone else [torch.from_numpy(r[:-1]).to(self.given.device) for r in rows]
            return side_by_side.score(module, names, inputs, self.labels(rows), at(rates), at(clips), divide=divide,
                                      segment=SEGMENT, most=self.given.together)  # fmt: skip

        start = {"all": (0.2, 2e-4), "block": (1.0, 8e-4), "output": (1.0, 4e-4), "both": (1.0, 4e-4)}[which]
        start = start[rule == "rms"]
        name = f"dynamic-{which}-{rule}"
        clips = (1.0,) if (which, rule) == ("all", "rms") else (1.0, math.inf)  # without one the former blew up
        rate, clip = self.choose(name, start, clips, together)
        return Arm(name, lambda rows: together(rows, [rate] * len(rows), [clip] * len(rows)),
                   f"rate {rate:.3g}, clip {clip:g}")  # fmt: skip

    def choose(self, name, start, seconds, together):
        """The best pair of a rate and another number on validation pages, all pairs side by side.

        together: losses of pages, each with a pair of its own.  The grid of rates grows until its best lies inside.
        """
        path = self.folder / f"rate-{name}.json"
        if not path.exists():
            rows = [self.pages.page(i, self.given.tune_tokens) for i in self.pages.valid]
            found, wanted = {}, [(i, second) for second in seconds for i in (-2, -1, 0, 1)]
            while wanted:
                pairs = [pair for pair in wanted for _ in rows]
                losses = together(rows * len(wanted), [start * 2.0**i for i, _ in pairs], [s for _, s in pairs])
                for k, pair in enumerate(wanted):
                    mean = float(torch.cat(losses[k * len(rows) : (k + 1) * len(rows)]).mean())
                    found[pair] = mean if math.isfinite(mean) else 1e9
                    print(f"  {name}: {start * 2.0 ** pair[0]:.3g}, {pair[1]:g}: {found[pair]:.4f}", flush=True)
                i, second = min(found, key=found.get)
                wanted = [(k, second) for k in (i - 2, i - 1, i + 1, i + 2) if (k, second) not in found]
                wanted = wanted if {(i - 1, second), (i + 1, second)} - set(found) else []
            path.write_text(json.dumps([start * 2.0**i, second]))
        return json.loads(path.read_text())

    def arms(self):
        """Makers of arms, cheap ones first; those of `tune` only where it has run."""
        yield "static", lambda: Arm("static", self.static)
        yield "memory", lambda: Arm("memory", self.slow)
        yield "cache", lambda: Arm("cache", lambda rows: self.cached(rows, self.slow(rows)))
        for refresh in (64, 16, 256):
            yield f"refresh-{refresh}", lambda r=refresh: self.of_block(f"refresh-{r}", self.untrained(r))
        yield "cumulative-64", lambda: self.of_block("cumulative-64", self.untrained(64, "cumulative"))
        yield "cache-refresh-64", lambda: self.of_block("cache-refresh-64", self.untrained(64), True)
        for refresh in (64, 16, 256, 0):
            name = f"refresh-{refresh}-trained" if refresh else "published"
            if (self.folder / f"layer-{refresh or 'sum'}.safetensors").exists():
                yield name, lambda n=name, r=refresh: self.of_block(n, self.tuned(r))
                yield f"{name}-not-learning", lambda n=name, r=refresh: self.not_learning(n, self.tuned(r))
                if refresh in (16, 64):
                    yield f"cache-{name}", lambda n=name, r=refresh: self.of_block(f"cache-{n}", self.tuned(r), True)
        at_64 = (self.folder / "layer-64.safetensors").exists()
        if at_64:
            name = "refresh-16-trained-at-64"
            yield name, lambda: self.of_block(name, self.tuned(64, 16))
            yield f"cache-{name}", lambda: self.of_block(f"cache-{name}", self.tuned(64, 16), True)
            inside = "cumulative-64-trained"
            yield inside, lambda: self.of_block(inside, self.tuned(64, 64, "cumulative"))
        if (self.folder / "layer-64-long.safetensors").exists():
            name_64, name_16 = "refresh-64-trained-long", "refresh-16-trained-at-64-long"
            yield name_64, lambda: self.of_block(name_64, self.tuned(64, long="-long"))
            yield f"{name_64}-not-learning", lambda: self.not_learning(name_64, self.tuned(64, long="-long"))
            yield f"cache-{name_64}", lambda: self.of_block(f"cache-{name_64}", self.tuned(64, long="-long"), True)
            yield name_16, lambda: self.of_block(name_16, self.tuned(64, 16, long="-long"))
        for trained, refresh, cache in product((False, True)[: 1 + at_64], (64, 16), (False, True)):
            made = "cache-" * cache + f"output-{refresh}" + "-trained" * trained
            yield made, lambda r=refresh, t=trained, c=cache: self.with_output(r, t, c)
        for which in ("block", "output", "both", "all"):
            for rule in ("rms", "sgd"):
                yield f"dynamic-{which}-{rule}", lambda r=rule, w=which: self.dynamic(r, w)

    def not_learning(self, name, block):
        """What the layer's training gained without learning from the page."""
        return Arm(f"{name}-not-learning", lambda rows: self.slow(rows, block))

    def of_block(self, name, block, cache=False):
        def together(rows):
            losses = self.learned(block, rows)
            return self.cached(rows, losses) if cache else losses

        note = json.dumps({n: round(s, 7) for n, s in block.step_sizes().items()})
        return Arm(name, together, note, most=32 if block.config.refresh else 4)


def score(given):
    """Every arm that --arms names, page by page, until the minutes are over."""
    scorer = Scorer(given)
    if given.wait:
        scorer.xs([scorer.pages.page(i) for i in scorer.pages.test])
        while not (scorer.folder / f"layer-{given.wait}.safetensors").exists():
            time.sleep(0.1)
    for name, make_arm in scorer.arms():
        if given.arms and not any(fnmatchcase(name, a) for a in given.arms):
            continue
        target = scorer.folder / "losses" / name
        target.mkdir(parents=True, exist_ok=True)
        mine = [i for i in scorer.pages.test[given.worker :: given.workers] if not (target / f"{i}.npy").exists()]
        if not mine:
            continue
        arm = make_arm()
        (target / "note.txt").write_text(arm.note)
        began, count = time.perf_counter(), 0
        mine.sort(key=lambda i: len(scorer.pages.page(i)))  # those that are read side by side are of like length
        size = min(given.together, arm.most)
        for some in (mine[at : at + size] for at in range(0, len(mine), size)):
            if time.perf_counter() - STARTED > 60 * given.minutes:
                print(f"time is over in {name}; run again to go on")
                return
            rows, start = [scorer.pages.page(i) for i in some], time.perf_counter()
            found = [x.float().cpu().numpy() for x in arm.together(rows)]
            seconds = (time.perf_counter() - start) / len(some)
            for i, losses in zip(some, found, strict=True):
                count += len(losses)
                part = target / f"{i}.part.npy"
                np.save(part, np.r_[losses, seconds].astype(np.float32))  # the seconds come last
                part.rename(target / f"{i}.npy")
        print(f"{name}: {count:,} tokens in {time.perf_counter() - began:.1f} s", flush=True)
