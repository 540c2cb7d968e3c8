"""Losses of pages, for one body: every token is scored before it is learned from.

A row is one page, its start token and its tokens, (T + 1,); losses of a page are (T,), in nats. Shapes: B pages, T
tokens, D width.
"""

import json
import math

import numpy as np
import torch
from model import autocast, build_layer, features, folder, layer_file, load_body
from pages import Pages
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from training import DIVERGED, best_rate

from fastweights.torch import GradientStatistics
from fastweights.torch.cache import NeuralCache

READ_AT_ONCE = 16  # pages that the body reads side by side
CACHED_AT_ONCE = 8  # pages that a cache reads side by side
SAMPLED = 16  # windows of training pages that gradients are measured on


class Scorer:
    """Scores pages in every way that needs no weights of its own for each page, and chooses rates.

    Attributes:
        args: of the command line.
        pages: the text.
        model: the body with its last layer; nothing of it is trained.
        folder: of the body, where chosen rates are kept.
    """

    def __init__(self, args):
        self.args, self.pages = args, Pages(args)
        self.model = load_body(args, self.pages)
        for p in self.model.parameters():
            p.requires_grad_(False)
        self.folder = folder(args)
        self.known_features = {}  # of the pages that were read, by the hash of their tokens

    def features_of(self, rows):
        """Features (T, D) of each page, read side by side with pages of similar length, and kept."""
        keys = [hash(row.tobytes()) for row in rows]
        new = {key: row for key, row in zip(keys, rows, strict=True) if key not in self.known_features}
        order = sorted(new, key=lambda key: len(new[key]))
        for start in range(0, len(order), READ_AT_ONCE):
            batch = order[start : start + READ_AT_ONCE]
            width = len(new[batch[-1]])
            padded = np.stack([np.pad(new[key], (0, width - len(new[key]))) for key in batch])
            for key, x in zip(batch, features(self.args, self.model, padded), strict=True):
                self.known_features[key] = x[: len(new[key]) - 1]
        return [self.known_features[key] for key in keys]

    def tokens_of(self, rows):
        """Tokens (T,) of each page that the model reads, in the order of `labels_of`."""
        return [torch.from_numpy(row[:-1]).to(self.args.device) for row in rows]

    def labels_of(self, rows):
        """Labels (T,) of each page."""
        return [torch.from_numpy(row[1:]).to(self.args.device) for row in rows]

    def padded(self, rows):
        """Features (B, T, D) and labels (B, T) of pages filled up to the longest, and a mask (B, T) of what is real."""
        x, labels = (pad_sequence(y, batch_first=True) for y in (self.features_of(rows), self.labels_of(rows)))
        lengths = torch.tensor([[len(row) - 1] for row in rows], device=x.device)
        return x, labels, torch.arange(x.shape[1], device=x.device) < lengths

    @torch.no_grad()
    def static(self, rows):
        """Losses of pages in windows of the trained length, each read with an empty memory."""
        length, losses = self.args.length, []
        for row in rows:
            windows = [torch.from_numpy(row[at : at + length + 1]) for at in range(0, len(row) - 1, length)]
            tokens = pad_sequence(windows, batch_first=True).to(self.args.device)
            with autocast(self.args):
                loss = self.model.score(tokens[:, :-1], tokens[:, 1:], learn=False).loss
            losses.append(loss.flatten()[: len(row) - 1])
        return losses

    @torch.no_grad()
    def not_learning(self, rows, layer=None):
        """Losses of pages by a layer that learns nothing, the model's when absent; the body's memory is carried."""
        layer = layer or self.model.fast
        pairs = zip(self.features_of(rows), self.labels_of(rows), strict=True)
        return [layer.slow_loss(x[None], labels[None])[0] for x, labels in pairs]

    @torch.no_grad()
    def learning(self, layer, rows):
        """Losses of pages by a layer that learns from them."""
        x, labels, mask = self.padded(rows)
        losses = layer.run(x, labels, mask.float(), logits=False, slow=False).loss
        return [loss[: len(row) - 1] for loss, row in zip(losses, rows, strict=True)]

    @torch.no_grad()
    def with_cache(self, rows, losses):
        """Losses of pages when the predictions that gave `losses` are mixed with those of a neural cache."""
        mixed = []
        for start in range(0, len(rows), CACHED_AT_ONCE):
            batch = rows[start : start + CACHED_AT_ONCE]
            x, labels, mask = self.padded(batch)
            loss = pad_sequence(losses[start : start + CACHED_AT_ONCE], batch_first=True)
            result, _ = NeuralCache(self.args.cache).score(x, labels, loss, mask=mask)
            mixed += [y[: len(row) - 1] for y, row in zip(result, batch, strict=True)]
        return mixed

    def valid_rows(self):
        """The pages that rates are chosen on, --tune-tokens of each."""
        return [self.pages.page(i, self.args.tune_tokens) for i in self.pages.valid]

    def choose_rate(self, name, start, set_rate, layer):
        """Give a layer the factor of its steps that is best on validation pages; found once, and kept in a file.

        Args:
            name: of the choice.
            start: factor to try first.
            set_rate: gives the layer this factor of its steps.
            layer: that learns.
        """
        path = self.folder / f"rate-{name}.json"

        def loss_at(rate):
            set_rate(rate)
            return min(DIVERGED, float(torch.cat(self.learning(layer, self.valid_rows())).mean()))

        if not path.exists():
            path.write_text(json.dumps(best_rate(name, start, loss_at)))
        set_rate(json.loads(path.read_text()))

    def choose_pair(self, name, start, seconds, losses_of):
        """The rate and the other number that are best together on validation pages; found once, and kept in a file.

        All pairs are tried side by side. Rates are start * 2^i; more of them are tried until the best one has two
        neighbours that are worse.

        Args:
            name: of the choice.
            start: a rate to try, with its neighbours.
            seconds: the other numbers.
            losses_of: from pages, a rate for each and an other number for each to the losses of the pages.
        """
        path = self.folder / f"rate-{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        rows = self.valid_rows()
        means = {}  # losses by (i, other number)
        to_try = [(i, second) for second in seconds for i in (-2, -1, 0, 1)]
        while to_try:
            pairs = [pair for pair in to_try for _ in rows]
            losses = losses_of(rows * len(to_try), [start * 2.0**i for i, _ in pairs], [other for _, other in pairs])
            for n, (i, other) in enumerate(to_try):
                mean = float(torch.cat(losses[n * len(rows) : (n + 1) * len(rows)]).mean())
                means[i, other] = mean if math.isfinite(mean) else DIVERGED
                print(f"  {name}: {start * 2.0**i:.3g}, {other:g}: {means[i, other]:.4f}", flush=True)
            i, other = min(means, key=means.get)
            to_try = []
            if (i - 1, other) not in means or (i + 1, other) not in means:
                to_try = [(j, other) for j in (i - 2, i - 1, i + 1, i + 2) if (j, other) not in means]
        path.write_text(json.dumps([start * 2.0**i, other]))
        return json.loads(path.read_text())

    def untrained_layer(self, refresh, within="held"):
        """The body's layer as it is, with steps of the best common factor of 1 / mean |key|^2.

        Args:
            refresh, within: how it learns, as for `build_layer`.
        """
        layer = build_layer(self.args, self.model, refresh, within)
        page = self.pages.page(self.pages.valid[0], self.args.tune_tokens)
        layer.start_steps(self.features_of([page])[0][None])
        name = f"refresh-{refresh}" if within == "held" else f"{within}-{refresh}"
        self.choose_rate(name, 0.5, _scaling_of_steps(layer), layer)
        return layer

    def tuned_layer(self, trained_at, refresh=None, within="held", long=False):
        """A layer that `tune` trained; where it now learns in another way, the best common factor of its steps.

        Args:
            trained_at: tokens between its updates in training; 0 for the published sum.
            refresh, within: how it learns now, as for `build_layer`; at `trained_at` when absent.
            long: whether it was trained on windows of --tune-length.
        """
        refresh = trained_at if refresh is None else refresh
        layer = build_layer(self.args, self.model, refresh, within)
        weights = load_file(layer_file(self.args, trained_at, long))
        layer.load_state_dict(weights | {"unembed": self.model.embedding.weight})
        if refresh != trained_at or within != "held":
            kind = "refresh" if within == "held" else within
            name = f"{kind}-{refresh}-trained-at-{trained_at}{'-long' if long else ''}"
            self.choose_rate(name, 1.0, _scaling_of_steps(layer), layer)
        return layer

    def gradient_statistics(self, rule):
        """Mean squares of the gradients of all weights over windows of training pages, for "rms"; None for "sgd"."""
        if rule == "sgd":
            return None
        rng, length = np.random.default_rng(0), min(512, self.args.length)
        windows = [self.pages.windows_inside(rng, 1, length, least=self.args.length) for _ in range(SAMPLED)]
        self.model.requires_grad_(True)
        rows = [torch.from_numpy(window).to(self.args.device) for window in windows]
        statistics = GradientStatistics.collect(self.model, rows, call=self.logits)
        self.model.requires_grad_(False)
        return statistics

    def logits(self, model, tokens, state):
        """Logits and state of a call of the model whose layer does not learn, as `DynamicEvaluation` wants it."""
        with autocast(self.args):
            logits, after = model.logits(tokens, state)
        return logits.float(), after._replace(fast=None)


def _scaling_of_steps(layer):
    """A function that sets the steps of a layer to a factor of what they are now."""
    first = layer.steps.detach().clone()

    def set_rate(factor):
        layer.steps.data.copy_(first + math.log(factor))

    return set_rate
