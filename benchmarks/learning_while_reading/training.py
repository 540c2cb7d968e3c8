"""The stages `body` and `tune`: a language model, and its last layer trained through its own learning."""

import math
import time

import numpy as np
import torch
from model import autocast, build_layer, build_model, features, folder, layer_file, load_body
from pages import Pages
from safetensors.torch import save_file

from fastweights.torch import graphs

WARM_UP = 4  # steps until all kernels are compiled, and CUDA graphs captured and replayed once
CAPTURED = 3  # the step that is captured as a CUDA graph
STEPS_AT_ONCE = 4  # steps of `tune` whose windows the body reads at once
DIVERGED = 1e9  # in the place of a loss that is larger, or not a number


def train_for_minutes(args, optimizer, take_gradients, name, warmup=50):
    """Train for --minutes: the learning rates rise for `warmup` steps, then follow a cosine by time.

    The first steps compile kernels and capture graphs; the cosine starts after them, and ends with the minutes.

    Args:
        args: of the command line.
        optimizer: whose groups have their peak learning rates.
        take_gradients: from random numbers to the loss of a batch and its number of tokens; leaves gradients in the
            parameters.
        name: of what is trained, for the lines with loss and speed that are printed.
        warmup: number of steps.
    """
    start, step, tokens, done = time.perf_counter(), 0, 0, 0.0
    end = start + 60 * args.minutes
    peaks = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    losses, rng = [], np.random.default_rng([args.seed, len(name)])
    while time.perf_counter() < end:
        if step >= WARM_UP:
            done = (time.perf_counter() - start) / (end - start)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (step + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))
        optimizer.zero_grad(set_to_none=True)
        loss, count = take_gradients(rng)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + count
        losses.append(loss.detach().clone())
        if step == WARM_UP:
            float(loss.detach())  # waits for the GPU
            print(f"{name} ready after {time.perf_counter() - start:.1f} s", flush=True)
            start, tokens = time.perf_counter(), 0
        if step % 20 == 0 or step == 1:
            mean = float(torch.stack(losses[-20:]).mean())  # waits for the GPU
            speed = tokens / (time.perf_counter() - start)
            print(f"{name} {done:5.0%} step {step} loss {mean:.4f} {speed:,.0f} tokens/s", flush=True)
            if not math.isfinite(mean):
                raise SystemExit(f"{name}: the loss is {mean}; try a smaller --lr")


def best_rate(name, start, loss_at, factor=2.0, most=10):
    """The rate start * factor^i, i a whole number, with the lowest loss: both its neighbours are worse.

    Args:
        name: of what the rate is for, for the lines that are printed.
        start: rate to try first.
        loss_at: from a rate to its loss.
        factor: between neighbours.
        most: rates that are tried, after which the best so far is taken.
    """
    losses = {}  # by i

    def loss_of(i):
        if i not in losses:
            rate = start * factor**i
            losses[i] = loss_at(rate)
            print(f"  {name}: rate {rate:.3g} gives {losses[i]:.4f}", flush=True)
        return losses[i]

    best = 0
    while len(losses) < most:
        _, move = min((loss_of(best), 0), (loss_of(best + 1), 1), (loss_of(best - 1), -1))
        if move == 0:
            break
        best += move
    return start * factor**best


class BodyStep:
    """Loss and gradients of a model whose Fast Weight Layer does not learn; on a GPU captured as a CUDA graph.

    Args:
        args: of the command line.
        model: whose parameters get gradients.
    """

    def __init__(self, args, model):
        self.args, self.model, self.calls, self.graph = args, model, 0, None
        self.parameters = [p for name, p in model.named_parameters() if not name.endswith("steps")]
        self.captures = args.device == "cuda" and args.body != "lstm"

    def compute(self, tokens, labels):
        """The loss of tokens (B, T) with labels (B, T), and the gradient of each parameter."""
        with torch.enable_grad(), autocast(self.args):
            loss = self.model.fast.slow_loss(self.model(tokens)[0], labels).mean()
        gradients = torch.autograd.grad(loss, self.parameters)
        return loss.detach(), *(g.clone() for g in gradients)  # some share memory, which clipping would change twice

    def __call__(self, tokens, labels):
        """The loss; the gradients are left in the parameters."""
        self.calls += 1
        inputs = tokens, labels
        if self.captures and self.calls == CAPTURED:
            self.graph = graphs.capture(self.compute, inputs)
            print("captured" if isinstance(self.graph, graphs.Graph) else self.graph, flush=True)
        if isinstance(self.graph, graphs.Graph):
            loss, *gradients = graphs.replay(self.graph, inputs)
        else:
            loss, *gradients = self.compute(*inputs)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient
        return loss


def train_body(args):
    """The stage `body`: train the language model, its Fast Weight Layer not learning."""
    target = folder(args) / "body.safetensors"
    if target.exists():
        return
    pages = Pages(args)
    model = build_model(args, pages.vocab)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 and not name.endswith("steps")]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
                                  lr=args.lr, betas=(0.9, 0.95), fused=True)  # fmt: skip
    step = BodyStep(args, model)

    def take_gradients(rng):
        rows = torch.from_numpy(pages.windows(rng, args.batch, args.length)).to(args.device)
        labels = rows[:, 1:].contiguous()
        return step(rows[:, :-1].contiguous(), labels), labels.numel()

    train_for_minutes(args, optimizer, take_gradients, f"{args.body} body")
    weights = {name: x.contiguous() for name, x in model.state_dict().items() if name != "fast.unembed"}
    save_file(weights, target)


def tune(args):
    """The stage `tune`: train the layer and its steps through its learning, once for each of --refresh.

    The body stays as it is. The windows lie inside a page.
    """
    pages = Pages(args)
    model = load_body(args, pages)
    for p in model.parameters():
        p.requires_grad_(False)
    for refresh in args.refresh:
        target = layer_file(args, refresh, long=bool(args.tune_length))
        if not target.exists():
            layer = _tuned_layer(args, pages, model, refresh)
            part = target.with_suffix(".part")
            save_file({name: x.contiguous() for name, x in layer.state_dict().items() if name != "unembed"}, part)
            part.rename(target)  # all at once, since others may wait for it


def _tuned_layer(args, pages, model, refresh):
    """A layer that is updated every `refresh` tokens, trained from the best common factor of its steps on."""
    layer, name = build_layer(args, model, refresh), f"layer {refresh or 'sum'}"
    length = args.tune_length or args.length
    rows = max(1, args.batch * args.length // length // 2)
    batches = []  # (features, labels) that the body has read and no step has used

    def next_loss(rng):
        """The loss of the next batch, and its number of tokens."""
        if not batches:
            windows = pages.windows_inside(rng, STEPS_AT_ONCE * rows, length)
            x, labels = features(args, model, windows), torch.from_numpy(windows[:, 1:]).to(args.device)
            batches.extend(zip(x.split(rows), labels.split(rows), strict=True))
        x, labels = batches.pop(0)
        with autocast(args):
            return layer.loss(x, labels, torch.ones(labels.shape, device=args.device)), labels.numel()

    def take_gradients(rng):
        loss, count = next_loss(rng)
        loss.backward()
        return loss, count

    first = features(args, model, pages.windows_inside(np.random.default_rng(0), rows, length))

    @torch.no_grad()
    def start_at(factor):
        """Set the steps to a common factor of 1 / mean |key|^2; returns the loss of a batch that is the same always."""
        batches.clear()
        layer.start_steps(first, factor)
        return min(DIVERGED, float(next_loss(np.random.default_rng(0))[0]))

    start_at(best_rate(name, 0.5 if refresh else 2**-9, start_at))  # a sum that never corrects itself wants less
    learned = [p for name, p in layer.named_parameters() if name not in ("steps", "unembed")]
    for p in (*learned, layer.steps):
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW([dict(params=learned, lr=args.layer_lr), dict(params=[layer.steps], lr=2e-2)],
                                  weight_decay=0.0, betas=(0.9, 0.95))  # fmt: skip
    batches.clear()
    train_for_minutes(args, optimizer, take_gradients, f"{args.body} {name}", warmup=10)
    print({name: round(size, 6) for name, size in layer.step_sizes().items()}, flush=True)
    return layer
