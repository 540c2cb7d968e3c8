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

from fastweights.torch import DynamicEvaluation, GradientStatistics
from fastweights.torch.cache import NeuralCache

SEGMENT = 64  # of dynamic evaluation
EPS = 1e-4  # of its rule rms
LAYER = ("dense1", "bias1", "dense2", "bias2", "scale", "shift")
OUTPUT = "model.embedding.weight"  # tied
STARTED = time.perf_counter()


class Arm:
    """A way to score pages.

    score: from the tokens of a page to its losses (T,);  together: from those of many pages, for ways that read them
    side by side;  note: what was chosen for it.
    """

    def __init__(self, name, score=None, note="", together=None):
        self.name, self.note = name, note
        self.together = together or (lambda rows: [score(row) for row in rows])
        self.side_by_side = together is not None


class Scorer:
    """All arms for one body."""

    def __init__(self, given):
        self.given, self.pages = given, Pages(given)
        self.model = load_body(given, self.pages)
        for p in self.model.parameters():
            p.requires_grad_(False)
        self.folder, self.seen = folder(given), {}

    def x(self, row):
        key = hash(row.tobytes())
        if key not in self.seen:
            self.seen[key] = features(self.given, self.model, row)
        return self.seen[key]

    def labels(self, row):
        return torch.from_numpy(row[1:])[None].to(self.given.device)

    def rate(self, name, start, score_at):
        """The best rate on validation pages, found once and kept."""
        path = self.folder / f"rate-{name}.json"
        if not path.exists():
            rows = [self.pages.page(i, self.given.tune_tokens) for i in self.pages.valid]
            mean = lambda rate: float(np.mean(np.concatenate([score_at(rate)(row) for row in rows])))  # noqa: E731
            path.write_text(json.dumps(best_rate(name, start, lambda r: min(1e9, mean(r)))))
        return json.loads(path.read_text())

    @torch.no_grad()
    def slow(self, row):
        return self.model.fast.slow_loss(self.x(row), self.labels(row))[0]

    @torch.no_grad()
    def static(self, row):
        """Windows of the trained length, each read afresh."""
        n, losses = self.given.length, []
        for at in range(0, len(row) - 1, n):
            part = torch.from_numpy(row[at : at + n + 1])[None].to(self.given.device)
            with autocast(self.given):
                losses.append(self.model.score(part[:, :-1], part[:, 1:], learn=False).loss[0])
        return torch.cat(losses)

    @torch.no_grad()
    def learned(self, block, row):
        labels = self.labels(row)
        return block.run(self.x(row), labels, torch.ones(labels.shape, device=labels.device), logits=False,
                         slow=False).loss[0]  # fmt: skip

    def untrained(self, refresh, within="held"):
        """The body's layer as it is, with steps of the best common factor of 1 / mean |key|^2."""
        block = layer(self.given, self.model, refresh, within)
        block.start_steps(self.x(self.pages.page(self.pages.valid[0], self.given.tune_tokens)))
        first = block.steps.detach().clone()

        def at(rate):
            block.steps.data.copy_(first + math.log(rate))
            return lambda row: self.learned(block, row).cpu().numpy()

        name = f"refresh-{refresh}" if within == "held" else f"{within}-{refresh}"
        at(self.rate(name, 0.5, at))
        return block

    def tuned(self, trained, refresh=None):
        """The layer trained at every `trained` tokens; where it is refreshed at others, a factor of its steps is
        chosen."""
        refresh = trained if refresh is None else refresh
        block = layer(self.given, self.model, refresh)
        weights = load_file(self.folder / f"layer-{trained or 'sum'}.safetensors")
        block.load_state_dict(weights | {"unembed": self.model.embedding.weight})
        if refresh != trained:
            first = block.steps.detach().clone()

            def at(rate):
                block.steps.data.copy_(first + math.log(rate))
                return lambda row: self.learned(block, row).cpu().numpy()

            at(self.rate(f"refresh-{refresh}-trained-at-{trained}", 1.0, at))
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
            losses = side_by_side.score(
                module, [*start, OUTPUT], [self.x(r)[0] for r in pages], [self.labels(r)[0] for r in pages], at(rates),
                at([1.0] * len(pages)), divide={OUTPUT: rows}, start=start, segment=refresh, most=self.given.together,
                steps={f"model.fast.{n}": sizes[n] * at(factors) for n in LAYER},
            )  # fmt: skip
            return [x.cpu().numpy() for x in losses]

        def scored(pages):
            losses = together(pages, [rate] * len(pages), [factor] * len(pages))
            if not cache:
                return losses
            return [
                self.cached(r, torch.from_numpy(x).to(self.given.device)) for r, x in zip(pages, losses, strict=True)
            ]

        name = f"output-{refresh}" + "-trained" * trained
        rate, factor = self.choose(name, 2e-4, (1.0, 0.5), together)
        return Arm("cache-" * cache + name, None, f"rate {rate:.3g}, layer's steps times {factor:g}", scored)

    @torch.no_grad()
    def cached(self, row, losses):
        return NeuralCache(self.given.cache).score(self.x(row), self.labels(row), losses[None])[0][0]

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

        def one_by_one(rows, rates, clips):
            """Recurrent layers of cuDNN do not run side by side with weights of their own."""
            found = []
            for row, lr, clip in zip(rows, rates, clips, strict=True):
                named = [n.removeprefix("model.") for n in names]
                how = dict(rule=rule, lr=lr, eps=EPS, segment=SEGMENT, carry=True, call=self.whole)
                with DynamicEvaluation(self.model, parameters=named, statistics=statistics, **how,
                                       clip=clip if math.isfinite(clip) else None) as dynamic:  # fmt: skip
                    tokens = torch.from_numpy(row)[None].to(self.given.device)
                    found.append(dynamic.run(tokens).losses[0].cpu().numpy())
            return found

        def side_by_side_(rows, rates, clips):
            at = lambda x: torch.tensor(x, device=self.given.device)  # noqa: E731
            inputs = [self.x(r)[0] if alone else torch.from_numpy(r[:-1]).to(self.given.device) for r in rows]
            losses = side_by_side.score(module, names, inputs, [self.labels(r)[0] for r in rows], at(rates), at(clips),
                                        divide=divide, segment=SEGMENT, most=self.given.together)  # fmt: skip
            return [x.cpu().numpy() for x in losses]

        together = one_by_one if not alone and self.given.body == "lstm" else side_by_side_
        start = {"all": (0.2, 2e-4), "block": (1.0, 8e-4), "output": (1.0, 4e-4), "both": (1.0, 4e-4)}[which]
        start = start[rule == "rms"]
        name = f"dynamic-{which}-{rule}"
        rate, clip = self.choose(name, start, (1.0, math.inf), together)
        return Arm(name, None, f"rate {rate:.3g}, clip {clip:g}",
                   lambda rows: together(rows, [rate] * len(rows), [clip] * len(rows)))  # fmt: skip

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
                    mean = float(np.mean(np.concatenate(losses[k * len(rows) : (k + 1) * len(rows)])))
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
        yield "cache", lambda: Arm("cache", lambda row: self.cached(row, self.slow(row)))
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
        for trained, refresh, cache in product((False, True)[: 1 + at_64], (64, 16), (False, True)):
            made = "cache-" * cache + f"output-{refresh}" + "-trained" * trained
            yield made, lambda r=refresh, t=trained, c=cache: self.with_output(r, t, c)
        for which in ("block", "output", "both", "all"):
            for rule in ("sgd", "rms"):
                yield f"dynamic-{which}-{rule}", lambda r=rule, w=which: self.dynamic(r, w)

    def not_learning(self, name, block):
        """What the layer's training gained without learning from the page."""
        return Arm(f"{name}-not-learning", lambda row: block.slow_loss(self.x(row), self.labels(row))[0].detach())

    def of_block(self, name, block, cache=False):
        def score(row):
            losses = self.learned(block, row)
            return self.cached(row, losses) if cache else losses

        return Arm(name, score, json.dumps({n: round(s, 7) for n, s in block.step_sizes().items()}))


def score(given):
    """Every arm that --arms names, page by page, until the minutes are over."""
    scorer = Scorer(given)
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
        size = given.together if arm.side_by_side else 1
        for some in (mine[at : at + size] for at in range(0, len(mine), size)):
            if time.perf_counter() - STARTED > 60 * given.minutes:
                print(f"time is over in {name}; run again to go on")
                return
            rows, start = [scorer.pages.page(i) for i in some], time.perf_counter()
            found = [x.float().cpu().numpy() if torch.is_tensor(x) else x for x in arm.together(rows)]
            seconds = (time.perf_counter() - start) / len(some)
            for i, losses in zip(some, found, strict=True):
                count += len(losses)
                part = target / f"{i}.part.npy"
                np.save(part, np.r_[losses, seconds].astype(np.float32))  # the seconds come last
                part.rename(target / f"{i}.npy")
        print(f"{name}: {count:,} tokens in {time.perf_counter() - began:.1f} s", flush=True)
