"""Pages of enwik8, the language model, and its last layer trained through its own learning."""

import math
import os
import re
import time
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.text.tokenizer import FILE, Subwords
from fastweights.torch import FWLBlock, graphs
from fastweights.torch.tree import map_tensors


def prepare(given):
    """pages.npz: tokens of all pages, where each begins, and the bytes of each token of the vocabulary."""
    if (given.work / "pages.npz").exists():
        return
    given.work.mkdir(parents=True, exist_ok=True)
    text = given.text.read_bytes()[: given.bytes or None]
    pages = [b"<page>" + page for page in text.split(b"<page>")[1:]]
    test = np.random.default_rng(0).random(len(pages)) < given.held_out
    if (given.work / FILE).exists():
        tokenizer = Subwords.read(given.work / FILE)
    else:
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


def words(given):
    """pages.npz of WikiText in the folder --text: articles as words and line ends; those of valid and test held out."""
    if (given.work / "pages.npz").exists():
        return
    given.work.mkdir(parents=True, exist_ok=True)
    articles, test = [], []
    for part in ("train", "valid", "test"):
        lines = (given.text / f"wiki.{part}.tokens").read_text().splitlines()
        starts = [i for i, line in enumerate(lines) if re.fullmatch(r" = [^=].* = ", line)]
        for a, b in pairwise([*starts, len(lines)]):
            articles.append([word for line in lines[a:b] if line.strip() for word in [*line.split(), "\n"]])
            test.append(part != "train")
    known = Counter(word for article, held in zip(articles, test, strict=True) if not held for word in article)
    number = {word: i for i, word in enumerate(known)}
    unknown, start = number["<unk>"], len(number)
    ids = [np.array([start, *(number.get(word, unknown) for word in article)], np.uint16) for article in articles]
    sizes = [*(len(word.encode()) + (word != "\n") for word in number), 0]  # a word and the space before it
    np.savez_compressed(given.work / "pages.npz", tokens=np.concatenate(ids), at=np.cumsum([0, *map(len, ids)]),
                        test=np.array(test), bytes=np.array(sizes))  # fmt: skip
    print(f"{len(ids)} articles, {sum(map(len, ids)):,} words of {start:,} kinds, {sum(test)} articles held out")


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
        self.lengths, self.most = lengths, given.most
        self.at_least(given.length)

    def at_least(self, length):
        """Windows are drawn from training pages of so many tokens."""
        self.long = self.train[self.lengths[self.train] >= length]

    def page(self, i, most=None):
        """(T + 1,): the start of a page and its tokens, up to a limit."""
        return self.tokens[self.at[i] : self.at[i + 1]][: 1 + (most or self.most)].astype(np.int64)

    def inside(self, rng, rows, length):
        """Windows (rows, length + 1), each inside one page."""
        pages = rng.choice(self.long, rows)
        starts = [rng.integers(self.at[i], self.at[i + 1] - length) for i in pages]
        return np.stack([self.tokens[s : s + length + 1] for s in starts]).astype(np.int64)

    def windows(self, rng, rows, length):
        """The same to train a body on: any token is as likely, and a quarter of them start where a page does."""
        share = self.lengths[self.long] / self.lengths[self.long].sum()
        pages, first = rng.choice(self.long, rows, p=share), rng.random(rows) < 0.25
        last = self.at[pages + 1] - length
        starts = np.where(first, self.at[pages], rng.integers(self.at[pages], last))
        return np.stack([self.tokens[s : s + length + 1] for s in starts]).astype(np.int64)


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


WARM = 4  # steps until all is compiled, captured and replayed once


def trained(given, optimizer, gradients_of, name, warmup=50):
    """Train for the minutes given: linear warm-up, then a cosine by time. Prints the loss and the speed.

    gradients_of: from random numbers to the loss and its tokens; it leaves the gradients.  The first steps compile
    kernels and record graphs; the cosine starts after them, and ends with the minutes.
    """
    began, step, tokens, done = time.perf_counter(), 0, 0, 0.0
    end = began + 60 * given.minutes
    peaks = [group["lr"] for group in optimizer.param_groups]
    recent, rng = [], np.random.default_rng([given.seed, len(name)])
    while time.perf_counter() < end:
        if step >= WARM:
            done = (time.perf_counter() - began) / (end - began)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        optimizer.zero_grad(set_to_none=True)
        loss, count = gradients_of(rng)
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + count
        recent.append(loss.detach().clone())
        if step == WARM:
            float(loss.detach())  # waits for the device
            print(f"{name} ready after {time.perf_counter() - began:.1f} s", flush=True)
            began, tokens = time.perf_counter(), 0
        if step % 20 == 0 or step == 1:
            mean = float(torch.stack(recent[-20:]).mean())  # waits for the device
            speed = tokens / (time.perf_counter() - began)
            print(f"{name} {done:5.0%} step {step} loss {mean:.4f} {speed:,.0f} tokens/s", flush=True)
            if not math.isfinite(mean):
                raise SystemExit(f"{name}: the loss is {mean}; try a smaller --lr")


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


class Step:
    """Loss and gradients of a body whose Fast Weight Layer does not learn; on a GPU as one CUDA graph."""

    def __init__(self, given, model):
        self.given, self.model, self.calls, self.graph = given, model, 0, None
        self.parameters = [p for n, p in model.named_parameters() if not n.endswith("steps")]
        self.captures = given.device == "cuda" and given.body != "lstm" and not os.environ.get("EAGER")

    def work(self, tokens, labels):
        with torch.enable_grad(), autocast(self.given):
            loss = self.model.fast.slow_loss(self.model(tokens)[0], labels).mean()
        grads = torch.autograd.grad(loss, self.parameters)
        return loss.detach(), *(g.clone() for g in grads)  # some share memory, which clipping would change twice

    def __call__(self, tokens, labels):
        self.calls += 1
        if self.captures and self.calls == 3:
            self.graph = graphs.capture(self.work, (tokens, labels))
            print("recorded" if isinstance(self.graph, graphs.Graph) else self.graph, flush=True)
        given = tokens, labels
        loss, *grads = graphs.replay(self.graph, given) if isinstance(self.graph, graphs.Graph) else self.work(*given)
        for p, grad in zip(self.parameters, grads, strict=True):
            p.grad = grad
        return loss


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

    step = Step(given, model)

    def gradients_of(rng):
        rows = torch.from_numpy(pages.windows(rng, given.batch, given.length)).to(given.device)
        return step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), rows[:, 1:].numel()

    trained(given, optimizer, gradients_of, f"{given.body} body")
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
def features(given, model, rows):
    """Features (B, T, D) of rows (B, T + 1), memory carried through each page."""
    tokens, state, parts = torch.as_tensor(rows).to(given.device), None, []
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
    for refresh in given.refresh:
        target = folder(given) / f"layer-{refresh or 'sum'}{'-long' * bool(given.tune_length)}.safetensors"
        if not target.exists():
            block = _tuned(given, pages, model, refresh)
            part = target.with_suffix(".part")
            save_file({n: x.contiguous() for n, x in block.state_dict().items() if n != "unembed"}, part)
            part.rename(target)  # all at once, since others may wait for it


def _tuned(given, pages, model, refresh):
    """A layer, trained from steps of the best common factor on."""
    block, name, length = layer(given, model, refresh), f"layer {refresh or 'sum'}", given.tune_length or given.length
    rows = max(1, given.batch * given.length // length // 2)
    pages.at_least(length)

    waiting = []

    def loss_of(rng):
        if not waiting:  # the body reads the windows of four steps at once
            found = pages.inside(rng, 4 * rows, length)
            x, labels = features(given, model, found), torch.from_numpy(found[:, 1:]).to(given.device)
            waiting.extend(zip(x.split(rows), labels.split(rows), strict=True))
        x, labels = waiting.pop(0)
        with autocast(given):
            return block.loss(x, labels, torch.ones(labels.shape, device=given.device)), labels.numel()

    def gradients_of(rng):
        loss, count = loss_of(rng)
        loss.backward()
        return loss, count

    first = features(given, model, pages.inside(np.random.default_rng(0), rows, length))

    @torch.no_grad()
    def loss_at(factor):
        waiting.clear()
        block.start_steps(first, factor)
        return min(1e9, float(loss_of(np.random.default_rng(0))[0]))

    loss_at(best_rate(name, 0.5 if refresh else 2**-9, loss_at))  # a sum that never corrects itself wants less
    learned = [p for n, p in block.named_parameters() if n not in ("steps", "unembed")]
    for p in (*learned, block.steps):
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW([dict(params=learned, lr=given.layer_lr), dict(params=[block.steps], lr=2e-2)],
                                  weight_decay=0.0, betas=(0.9, 0.95))  # fmt: skip
    waiting.clear()
    trained(given, optimizer, gradients_of, f"{given.body} {name}", warmup=10)
    print({n: round(s, 6) for n, s in block.step_sizes().items()}, flush=True)
    return block
