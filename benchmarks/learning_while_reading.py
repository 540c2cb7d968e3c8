"""Learning while reading at scale: what each way to learn from a page gains on the pages of enwik8.

    python benchmarks/learning_while_reading.py prepare --text enwik8 --work W
    python benchmarks/learning_while_reading.py body --work W --body gated-delta --minutes 5
    python benchmarks/learning_while_reading.py tune --work W --body gated-delta --minutes 1.5
    python benchmarks/learning_while_reading.py score --work W --body gated-delta --out results --minutes 8
    python benchmarks/learning_while_reading.py speed --work W --body gated-delta --out results
    python benchmarks/learning_while_reading.py table --work W --body gated-delta --out results

`prepare` splits the text at `<page>`, trains a tokenizer and encodes. `body` trains a language model whose last layer
is a Fast Weight Layer that does not learn. `tune` trains that layer and its steps through their own learning, the rest
frozen: the published sum, and gradients at the current weights every 16, 64 and 256 tokens. `score` scores held-out
pages, every token before it is learned from, in every arm; it goes on where it stopped, and several processes may score
different --arms at once. `speed` times the arms one page at a time. `table` writes CSV files: the loss of each page, by
position, frequency and repetition, and one line per arm.

W holds what is large: tokens, weights, losses per page.
"""

import argparse
import csv
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path

import dynamic_side_by_side as side_by_side
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.models.mixers import Pieces
from fastweights.text.tokenizer import Subwords
from fastweights.torch import DynamicEvaluation, FWLBlock, GradientStatistics
from fastweights.torch.cache import NeuralCache
from fastweights.torch.tree import map_tensors

REFRESH = (16, 64, 256)
SEGMENT = 64  # of dynamic evaluation
EPS = 1e-4  # of its rule rms
STARTED = time.perf_counter()


def prepare(given):
    """pages.npz: tokens of all pages, where each begins, and the bytes of each token of the vocabulary."""
    if (given.work / "pages.npz").exists():
        return
    given.work.mkdir(parents=True, exist_ok=True)
    text = given.text.read_bytes()[: given.bytes or None]
    pages = [b"<page>" + page for page in text.split(b"<page>")[1:]]
    test = np.random.default_rng(0).random(len(pages)) < given.held_out
    tokenizer = Subwords.train(given.vocab, (p for p, held in zip(pages, test, strict=True) if not held))
    tokenizer.save(given.work)
    ids = []
    for at in range(0, len(pages), 512):  # an encoding takes a hundred times the memory of its ids
        some = [p.decode("latin-1") for p in pages[at : at + 512]]
        encoded = tokenizer.tokenizer.encode_batch(some, add_special_tokens=False)
        ids += [np.array([tokenizer.start, *e.ids], np.uint16) for e in encoded]
    np.savez_compressed(given.work / "pages.npz", tokens=np.concatenate(ids), at=np.cumsum([0, *map(len, ids)]),
                        test=test, bytes=tokenizer.lengths())  # fmt: skip
    print(f"{len(pages)} pages, {sum(map(len, ids)):,} tokens, {int(test.sum())} pages held out")


class Pages:
    """The encoded pages: those to train on, to choose rates on, and to score, both of at least `least` tokens."""

    def __init__(self, given):
        found = np.load(given.work / "pages.npz")
        self.tokens, self.at, self.bytes = found["tokens"], found["at"], found["bytes"]
        self.vocab = len(self.bytes)
        lengths = np.diff(self.at) - 1
        held = np.flatnonzero(found["test"] & (lengths >= given.least))
        order = np.random.default_rng(1).permutation(held)
        self.valid, self.test = order[: given.valid], np.sort(order[given.valid :][: given.pages])
        self.train = np.flatnonzero(~found["test"])
        self.long = self.train[lengths[self.train] >= given.length]
        self.most = given.most

    def page(self, i, most=None):
        """(T + 1,): the start of a page and its tokens, up to a limit."""
        return self.tokens[self.at[i] : self.at[i + 1]][: 1 + (most or self.most)].astype(np.int64)

    def inside(self, rng, rows, length):
        """Windows (rows, length + 1), each inside one page."""
        pages = rng.choice(self.long, rows)
        starts = [rng.integers(self.at[i], self.at[i + 1] - length) for i in pages]
        return np.stack([self.tokens[s : s + length + 1] for s in starts]).astype(np.int64)

    def packed(self, rng, rows, length):
        """Windows (rows, length + 1) of pages laid end to end in any order."""
        found = np.empty((rows, length + 1), np.int64)
        for row in found:
            filled = 0
            while filled < len(row):
                page = self.page(rng.choice(self.train), length * 8)
                skip = 0 if filled else rng.integers(len(page))  # the first may be cut
                part = page[skip:][: len(row) - filled]
                row[filled : filled + len(part)] = part
                filled += len(part)
        return found


def folder(given):
    path = given.work / f"{given.body}-{given.depth}x{given.dim}-seed{given.seed}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def make(given, vocab):
    torch.manual_seed(given.seed)
    config = Config(layers=f"{given.body}*{given.depth}", dim=given.dim, heads=given.dim // 64 or 2, head="fwl",
                    refresh=64, length=given.length, window=given.window)  # fmt: skip
    return LanguageModel(config, vocab).to(given.device)


def autocast(given):
    return torch.autocast("cuda", torch.bfloat16) if given.device == "cuda" else nullcontext()


def trained(given, optimizer, loss_of, name, warmup=50):
    """Train for the minutes given: linear warm-up, then a cosine by time. Prints the loss and the speed."""
    began, step, tokens = time.perf_counter(), 0, 0
    peaks = [group["lr"] for group in optimizer.param_groups]
    recent, rng = [], np.random.default_rng([given.seed, len(name)])
    while (done := (time.perf_counter() - began) / 60 / given.minutes) < 1:
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        loss, count = loss_of(rng)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + count
        recent.append(loss.detach())
        if step % 20 == 0 or step == 1:
            mean = float(torch.stack(recent[-20:]).mean())  # waits for the device
            speed = tokens / (time.perf_counter() - began)
            print(f"{name} {done:5.0%} step {step} loss {mean:.4f} {speed:,.0f} tokens/s", flush=True)
            if not math.isfinite(mean):
                raise SystemExit(f"{name}: the loss is {mean}; try a smaller --lr")


def body(given):
    """The language model, its Fast Weight Layer not learning."""
    target = folder(given) / "body.safetensors"
    if target.exists():
        return
    pages = Pages(given)
    model = make(given, pages.vocab)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 and not n.endswith("steps")]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
                                  lr=given.lr, betas=(0.9, 0.95), fused=True)  # fmt: skip

    def loss_of(rng):
        rows = (pages.inside if given.body == "lstm" else pages.packed)(rng, given.batch, given.length)
        tokens, labels = (torch.from_numpy(np.ascontiguousarray(x)) for x in (rows[:, :-1], rows[:, 1:]))
        weights = (labels != pages.vocab - 1).to(given.device)
        pieces = None if given.body == "lstm" else Pieces.of((tokens == pages.vocab - 1).numpy(), given.device)
        with autocast(given):
            scores = model.score(tokens.to(given.device), labels.to(given.device), pieces=pieces, learn=False)
        return (scores.loss * weights).sum() / weights.sum(), weights.numel()

    trained(given, optimizer, loss_of, f"{given.body} body")
    save_file({n: x.contiguous() for n, x in model.state_dict().items() if n != "fast.unembed"}, target)


def load_body(given, pages):
    model = make(given, pages.vocab)
    weights = load_file(folder(given) / "body.safetensors")
    model.load_state_dict(weights | {"fast.unembed": weights["embedding.weight"]})
    return model.to(given.device).eval()


def layer(given, model, refresh, within="held"):
    """The model's last layer with another way to learn: refresh=0 is the published sum, with decay."""
    how = dict(refresh=refresh, within=within) if refresh else dict(decay=0.999)
    block = FWLBlock(given.dim, model.vocab, inputs=given.dim, hidden=model.fast.config.hidden, normalizer=1.0,
                     log_steps=True, unembed=model.embedding.weight, **how).to(given.device)  # fmt: skip
    block.load_state_dict(model.fast.state_dict())
    return block


@torch.no_grad()
def features(given, model, row, batched=False):
    """Features (B, T, D) of rows (B, T + 1), memory carried through each page."""
    tokens, state, parts = torch.as_tensor(row).to(given.device), None, []
    tokens = tokens if batched else tokens[None]
    for at in range(0, tokens.shape[1] - 1, given.length):
        with autocast(given):
            x, blocks = model(tokens[:, at : min(at + given.length, tokens.shape[1] - 1)], state)
        parts.append(x.float())
        state = model.init_state(len(tokens))._replace(blocks=map_tensors(torch.Tensor.detach, blocks))
    return torch.cat(parts, 1)


def tune(given):
    """The layer and its steps, trained through their own learning on windows inside a page, for each way to learn."""
    pages = Pages(given)
    model = load_body(given, pages)
    for p in model.parameters():
        p.requires_grad_(False)
    rows = max(1, given.batch // 2)
    for refresh in given.refresh:
        target = folder(given) / f"layer-{refresh or 'sum'}.safetensors"
        if target.exists():
            continue
        block = layer(given, model, refresh)
        block.start_steps(features(given, model, pages.inside(np.random.default_rng(0), rows, given.length), True))
        if not refresh:
            block.steps.data -= math.log(8.0)  # a sum of gradients that never corrects itself wants smaller ones
        learned = [p for n, p in block.named_parameters() if n not in ("steps", "unembed")]
        for p in (*learned, block.steps):
            p.requires_grad_(True)
        optimizer = torch.optim.AdamW([dict(params=learned, lr=1e-3), dict(params=[block.steps], lr=2e-2)],
                                      weight_decay=0.0, betas=(0.9, 0.95))  # fmt: skip

        def loss_of(rng, block=block):
            found = pages.inside(rng, rows, given.length)
            x, labels = features(given, model, found, True), torch.from_numpy(found[:, 1:]).to(given.device)
            with autocast(given):
                return block.loss(x, labels, torch.ones(labels.shape, device=given.device)), labels.numel()

        trained(given, optimizer, loss_of, f"{given.body} layer {refresh or 'sum'}", warmup=10)
        print({n: round(s, 6) for n, s in block.step_sizes().items()}, flush=True)
        save_file({n: x.contiguous() for n, x in block.state_dict().items() if n != "unembed"}, target)


class Arm:
    """A way to score pages.

    score: from the tokens of a page to its losses (T,);  together: from those of many pages, for ways that read them
    side by side;  note: what was chosen for it.
    """

    def __init__(self, name, score=None, note="", together=None):
        self.name, self.note = name, note
        self.together = together or (lambda rows: [score(row) for row in rows])
        self.side_by_side = together is not None


def best_rate(name, start, loss_of, factor=2.0, most=10):
    """The rate with the lowest loss among start * factor^i, moving until both neighbours are worse."""
    tried = {}

    def at(i):
        if i not in tried:
            tried[i] = loss_of(start * factor**i)
            print(f"  {name}: rate {start * factor**i:.3g} gives {tried[i]:.4f}", flush=True)
        return tried[i]

    i = 0
    while len(tried) < most:
        better = min((at(i), 0), (at(i + 1), 1), (at(i - 1), -1))[1]
        if not better:
            break
        i += better
    return start * factor**i


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

    def tuned(self, refresh):
        block = layer(self.given, self.model, refresh)
        weights = load_file(self.folder / f"layer-{refresh or 'sum'}.safetensors")
        block.load_state_dict(weights | {"unembed": self.model.embedding.weight})
        return block

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
        """Dynamic evaluation of all weights, memory carried, or of the layer's own on features read once."""
        statistics, alone = self.divide(rule), which == "block"
        divide = None if statistics is None else {f"model.{n}": x.sqrt() + EPS for n, x in statistics.items()}
        module = side_by_side.Alone(self.model) if alone else side_by_side.Whole(self.model)
        names = [n for n, _ in module.named_parameters() if not n.endswith("steps")]
        if alone:
            names = [f"model.fast.{n}" for n in ("dense1", "bias1", "dense2", "bias2", "scale", "shift")]

        def together(rows, rates, clips):
            at = lambda x: torch.tensor(x, device=self.given.device)  # noqa: E731
            inputs = [self.x(r)[0] if alone else torch.from_numpy(r[:-1]).to(self.given.device) for r in rows]
            losses = side_by_side.score(module, names, inputs, [self.labels(r)[0] for r in rows], at(rates), at(clips),
                                        divide=divide, segment=SEGMENT, most=self.given.together)  # fmt: skip
            return [x.cpu().numpy() for x in losses]

        start = {("sgd", "all"): 0.2, ("sgd", "block"): 1.0, ("rms", "all"): 2e-4, ("rms", "block"): 8e-4}[rule, which]
        name = f"dynamic-{which}-{rule}"
        rate, clip = self.rate_and_clip(name, start, together)
        return Arm(name, None, f"rate {rate:.3g}, clip {clip:g}",
                   lambda rows: together(rows, [rate] * len(rows), [clip] * len(rows)))  # fmt: skip

    def rate_and_clip(self, name, start, together):
        """The best pair on validation pages, all pairs side by side; the grid grows until its best lies inside."""
        path = self.folder / f"rate-{name}.json"
        if not path.exists():
            rows = [self.pages.page(i, self.given.tune_tokens) for i in self.pages.valid]
            found, wanted = {}, [(i, clip) for clip in (1.0, math.inf) for i in (-2, -1, 0, 1)]
            while wanted:
                pairs = [pair for pair in wanted for _ in rows]
                losses = together(rows * len(wanted), [start * 2.0**i for i, _ in pairs], [c for _, c in pairs])
                for k, pair in enumerate(wanted):
                    mean = float(np.mean(np.concatenate(losses[k * len(rows) : (k + 1) * len(rows)])))
                    found[pair] = mean if math.isfinite(mean) else 1e9
                    print(
                        f"  {name}: rate {start * 2.0 ** pair[0]:.3g}, clip {pair[1]:g}: {found[pair]:.4f}", flush=True
                    )
                i, clip = min(found, key=found.get)
                wanted = [(k, clip) for k in (i - 2, i - 1, i + 1, i + 2) if (k, clip) not in found]
                wanted = wanted if {(i - 1, clip), (i + 1, clip)} - set(found) else []
            path.write_text(json.dumps([start * 2.0**i, clip]))
        return json.loads(path.read_text())

    def arms(self):
        """Makers of arms, cheap ones first; those of `tune` only where it has run."""
        yield "static", lambda: Arm("static", self.static)
        yield "memory", lambda: Arm("memory", self.slow)
        yield "cache", lambda: Arm("cache", lambda row: self.cached(row, self.slow(row)))
        for refresh in (64, 16, 256):
            yield f"refresh-{refresh}", lambda r=refresh: self.of_block(f"refresh-{r}", self.untrained(r))
        yield "cumulative-64", lambda: self.of_block("cumulative-64", self.untrained(64, "cumulative"))
        yield "cache-refresh-64", lambda: self.of_block("cache-refresh-64", self.untrained(64), cache=True)
        for refresh in (64, 16, 256, 0):
            name = f"refresh-{refresh}-trained" if refresh else "published"
            if (self.folder / f"layer-{refresh or 'sum'}.safetensors").exists():
                yield name, lambda n=name, r=refresh: self.of_block(n, self.tuned(r))
                yield f"{name}-not-learning", lambda n=name, r=refresh: self.not_learning(n, self.tuned(r))
                if refresh in (16, 64):
                    yield (
                        f"cache-{name}",
                        lambda n=name, r=refresh: self.of_block(f"cache-{n}", self.tuned(r), cache=True),
                    )
        for rule in ("sgd", "rms"):
            yield f"dynamic-block-{rule}", lambda r=rule: self.dynamic(r, "block")
        for rule in ("sgd", "rms"):
            yield f"dynamic-all-{rule}", lambda r=rule: self.dynamic(r, "all")

    def not_learning(self, name, block):
        """What the layer's training gained without learning from the page."""
        return Arm(f"{name}-not-learning", lambda row: block.slow_loss(self.x(row), self.labels(row))[0].detach())

    def of_block(self, name, block, cache=False):
        def score(row):
            losses = self.learned(block, row)
            return self.cached(row, losses) if cache else losses

        return Arm(name, score, json.dumps({n: round(s, 7) for n, s in block.step_sizes().items()}))


def score(given):
    """Every arm whose name starts with one of --arms, page by page, until the minutes are over."""
    scorer = Scorer(given)
    for name, make_arm in scorer.arms():
        if given.arms and not any(name.startswith(a) for a in given.arms):
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


def speed(given):
    """speed.csv: seconds of one page per way to read it, body included, one page at a time; and whether dynamic
    evaluation side by side gives the losses of `DynamicEvaluation`."""
    scorer = Scorer(given)
    row = max((scorer.pages.page(i, given.tune_tokens) for i in scorer.pages.test), key=len)
    labels, part = scorer.labels(row), row[: 16 * SEGMENT + 1]

    def read(block=None, cache=False):
        scorer.seen.clear()
        losses = scorer.slow(row) if block is None else scorer.learned(block, row)
        return scorer.cached(row, losses) if cache else losses

    def dynamic(rule="sgd", statistics=None, call=scorer.whole):
        with DynamicEvaluation(scorer.model, rule=rule, lr=0.05 if rule == "sgd" else 5e-5, eps=EPS, segment=SEGMENT,
                               carry=True, clip=1.0, statistics=statistics, call=call) as run:  # fmt: skip
            return run.run(torch.from_numpy(part)[None].to(given.device)).losses[0]

    blocks = {refresh: layer(given, scorer.model, refresh) for refresh in (16, 64, 256, 0)}
    ways = {"memory": read, "cache": lambda: read(cache=True)}
    ways |= {f"refresh-{r}" if r else "published": lambda b=b: read(b) for r, b in blocks.items()}
    ways |= {"cache-refresh-64": lambda: read(blocks[64], True), "dynamic-all-sgd": dynamic}
    lines = []
    for name, way in ways.items():
        times = []
        for _ in range(4 if name != "dynamic-all-sgd" else 2):
            _wait(given)
            start = time.perf_counter()
            losses = way()
            _wait(given)
            times.append(time.perf_counter() - start)
        lines.append([name, len(losses), f"{(found := float(np.median(times[1:]))):.4f}", f"{len(losses) / found:.0f}"])
        print(*lines[-1], flush=True)
    out = given.out / scorer.folder.name
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "speed.csv", ["arm", "tokens", "seconds", "tokens_per_second"], lines)
    for rule in ("sgd", "rms"):
        statistics = scorer.divide(rule)
        want = dynamic(rule, statistics, lambda model, tokens, state: _without_fast(*model.logits(tokens, state)))
        module = side_by_side.Whole(scorer.model)
        got = side_by_side.score(
            module, [n for n, _ in module.named_parameters()], [torch.from_numpy(part[:-1]).to(given.device)] * 2,
            [labels[0, : len(part) - 1]] * 2, torch.tensor([0.05 if rule == "sgd" else 5e-5] * 2, device=given.device),
            torch.tensor([1.0, 1.0], device=given.device),
            divide=statistics and {f"model.{n}": x.sqrt() + EPS for n, x in statistics.items()},
        )[0]  # fmt: skip
        print(f"{rule}, side by side {float(got.mean()):.5f}, one page at a time {float(want.mean()):.5f} nats; "
              f"largest difference of a token {float((got - want).abs().max()):.5f}", flush=True)  # fmt: skip


def _without_fast(logits, state):
    return logits, state._replace(fast=None)


def _wait(given):
    if given.device == "cuda":
        torch.cuda.synchronize()


POSITIONS = [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
COUNTS = [0, 100, 1000, 10_000, 100_000, 10**9]  # of a token in the training pages
REPEATS = [0, 1, 2, 4, 8, 16, 32, 10**9]  # earlier in the page


def table(given):
    """CSV files of the arms that have all pages.

    pages.csv: bytes of each page and nats by arm.  bins.csv: tokens, bytes and nats by position in the page, by count
    of the token in training, and by how often it was earlier in the page.  summary.csv: bits per byte of all pages, and
    the gain over carried memory with a 95 % interval by bootstrap over pages.
    """
    pages, source = Pages(given), folder(given)
    out = given.out / source.name
    out.mkdir(parents=True, exist_ok=True)
    rows, found = [pages.page(i) for i in pages.test], {}
    for target in sorted((source / "losses").glob("*")):
        files = [target / f"{i}.npy" for i in pages.test]
        if all(f.exists() for f in files):
            found[target.name] = [np.load(f) for f in files]
    trained = np.zeros(len(pages.tokens), bool)
    for i in pages.train:
        trained[pages.at[i] : pages.at[i + 1]] = True
    counts = np.bincount(pages.tokens[trained], minlength=pages.vocab)
    tokens = np.concatenate([row[1:] for row in rows])
    size = pages.bytes[tokens]
    kinds = {
        "position": (np.concatenate([np.arange(len(row) - 1) for row in rows]), POSITIONS),
        "count": (counts[tokens], COUNTS),
        "repeats": (np.concatenate([_earlier(row[1:]) for row in rows]), REPEATS),
    }
    bins = []
    for arm, losses in found.items():
        nats = np.concatenate([x[:-1] for x in losses]).astype(np.float64)
        for kind, (values, edges) in kinds.items():
            where = np.digitize(values, edges) - 1
            for k, low in enumerate(edges[:-1]):
                if (here := where == k).any():
                    bins.append([arm, kind, low, edges[k + 1], here.sum(), size[here].sum(), f"{nats[here].sum():.3f}"])
    _write(out / "bins.csv", ["arm", "by", "low", "high", "tokens", "bytes", "nats"], bins)
    total = np.array([pages.bytes[row[1:]].sum() for row in rows])
    per_page = {n: np.array([x[:-1].sum(dtype=np.float64) for x in y]) for n, y in found.items()}
    lines = [[i, len(row) - 1, b, *(f"{x[k]:.3f}" for x in per_page.values())]
             for k, (i, row, b) in enumerate(zip(pages.test, rows, total, strict=True))]  # fmt: skip
    _write(out / "pages.csv", ["page", "tokens", "bytes", *per_page], lines)
    draws = np.random.default_rng(0).integers(len(total), size=(2000, len(total)))
    lines = []
    for name, nats in sorted(per_page.items(), key=lambda item: -item[1].sum()):
        less = (per_page.get("memory", nats) - nats) / math.log(2)
        some = less[draws].sum(1) / total[draws].sum(1)
        gain = [less.sum() / total.sum(), *np.quantile(some, [0.025, 0.975])]
        note = (source / "losses" / name / "note.txt").read_text()
        seconds = sum(float(x[-1]) for x in found[name])
        lines.append([name, len(total), len(tokens), f"{nats.sum() / math.log(2) / total.sum():.4f}",
                      *(f"{g:.4f}" for g in gain), f"{seconds:.1f}", note])  # fmt: skip
    names = ["arm", "pages", "tokens", "bits_per_byte", "gain_over_memory", "low", "high", "seconds", "note"]
    _write(out / "summary.csv", names, lines)
    print((out / "summary.csv").read_text())


def _earlier(tokens):
    """(T,): how often each token was earlier in the page."""
    seen, found = {}, np.zeros(len(tokens), np.int64)
    for t, token in enumerate(tokens.tolist()):
        found[t] = seen.get(token, 0)
        seen[token] = found[t] + 1
    return found


def _write(path, names, lines):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *lines])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["prepare", "body", "tune", "score", "speed", "table"])
    parser.add_argument("--work", type=Path, required=True, help="folder for tokens, weights and losses")
    parser.add_argument("--text", type=Path, help="the text, split at <page>; for prepare")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for CSV files")
    parser.add_argument("--bytes", type=int, default=0, help="read so much of the text; 0 for all")
    parser.add_argument("--vocab", type=int, default=16_383)
    parser.add_argument("--held-out", type=float, default=0.12, help="share of the pages that are not trained on")
    parser.add_argument("--body", default="gated-delta", help="gated-delta, softmax, lstm or another mixer")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a training window")
    parser.add_argument("--window", type=int, default=1024, help="tokens that softmax attention looks back")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, of each layer in tune, or of scoring")
    parser.add_argument(
        "--refresh", type=int, nargs="*", default=[64, 16, 256, 0], help="for tune; 0 is the published sum"
    )
    parser.add_argument("--least", type=int, default=4096, help="tokens of the shortest page to score")
    parser.add_argument("--most", type=int, default=65_536, help="tokens of a page that are scored")
    parser.add_argument("--pages", type=int, default=120, help="pages to score")
    parser.add_argument("--valid", type=int, default=6, help="pages to choose rates on")
    parser.add_argument("--tune-tokens", type=int, default=4096, help="tokens of each of them")
    parser.add_argument("--cache", type=int, default=2048, help="window of the neural cache")
    parser.add_argument("--arms", nargs="*", default=[], help="beginnings of names; all when absent")
    parser.add_argument("--together", type=int, default=32, help="pages that dynamic evaluation reads side by side")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the pages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    globals()[given.stage](given)


if __name__ == "__main__":
    main()
