"""What the two forms of the refreshed layer's training loss share: dual.py (on a GPU) and walk.py (on a CPU).

A form computes, for a batch of rows, the losses of the layer that learns while it reads and the gradients of their sum,
all by hand; training_loss.py chooses one and makes an autograd function of it. Both forms use these letters:

    B rows of n chunks of C tokens, L = n C;  D, F and E: widths of the input, the hidden layer and the output
    h = x W1 + b1      r = relu(h)    a = r^2      y = a W2 + b2      n = scale norm(y) + shift, the features
    gn                 gradient of each token's loss at its features;  share: how much of it is learned
    g3 = share gn      gradient at n;   g2 at y;   u = g2 W2^T;   g1 = 2 r u at h: these are what the layer learns from
    v1 = -e_0 g1, v2 = -e_2 g2         what a token writes into W1, under the key x, and into W2, under the key a
    vectors            bias1, bias2, scale and shift side by side, F + 3 E numbers; they learn g1, g2, g3 norm(y) and g3
    e                  the six step sizes, in the order of `fwl_config.STEPS`

A variable `dx` is the gradient of x of the training loss. Where h, W1 or vectors change from chunk to chunk, the
docstrings say of which chunk they are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig
from fastweights.torch import cross_entropy
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.learning import dual_passes


class Weights(NamedTuple):
    """Trained weights, or their gradients.

    Attributes:
        W1, W2: (D, F) and (F, E), in the dtype of products.
        vectors: (F + 3 E,), bias1, bias2, scale and shift, in float32 or wider.
        e: (6,), the step sizes, in float32 or wider.
        embedding, embedding_bias: (V, E) and (V,), the output embedding, in the dtype of products.
    """

    W1: Tensor
    W2: Tensor
    vectors: Tensor
    e: Tensor
    embedding: Tensor
    embedding_bias: Tensor


class Batch(NamedTuple):
    """Rows that are read, and what they learned in earlier windows.

    Attributes:
        x: (B, L, D), in the dtype of products.
        labels: (B, L).
        share: (B, L), how much of a token's gradient is learned.
        loss_weights: (B, L), the factor of each token's loss in the sum that is trained.
        slow_loss_weights: (B, L), the same of the loss by the trained weights alone.
        read_factors: (B, n, n), how much of what chunk j has taught counts for chunk c, at [c, j]: 0 unless j is an
            earlier chunk of the same document; else what decay has left of it, 1 without decay.
        carried_factors: (B, n), how much of what the row carried into the window counts for each chunk, likewise.
        S1, S2, S_vectors: what was carried: changes of W1 (B, D, F) and W2 (B, F, E), in the dtype of products, and of
            the vectors (B, F + 3 E); None where nothing was.
    """

    x: Tensor
    labels: Tensor
    share: Tensor
    loss_weights: Tensor
    slow_loss_weights: Tensor
    read_factors: Tensor
    carried_factors: Tensor
    S1: Tensor | None = None
    S2: Tensor | None = None
    S_vectors: Tensor | None = None


class LossForm:
    """One batch of rows, to be read forwards and backwards: base class of `DualForm` and `WalkedForm`.

    Args:
        config: arguments of the layer.
        weights: its trained weights.
        batch: the rows.
        unit_factors: True promises that read_factors are 1 for all earlier chunks, without decay or new documents.
    """

    def __init__(self, config: FWLConfig, weights: Weights, batch: Batch, *, unit_factors: bool):
        assert config.refresh is not None
        self.config, self.weights, self.batch, self.unit_factors = config, weights, batch, unit_factors
        self.C, (self.B, self.L, self.D) = config.refresh, batch.x.shape
        self.n, self.F, self.E = self.L // self.C, config.hidden_width, config.size
        self.wide = accumulation_dtype(batch.x)
        self.passes = passes_for(batch.x, config)
        e, F, E = weights.e, self.F, self.E
        # minus the step of each number of the vectors, (F + 3 E,)
        self.minus_steps = -torch.cat([e[1:2].expand(F), e[3:4].expand(E), e[4:5].expand(E), e[5:6].expand(E)])
        # by chunk, (n, B, C)
        self.labels, self.share, self.loss_weights = (
            y.view(self.B, self.n, self.C).transpose(0, 1).contiguous()
            for y in (batch.labels, batch.share, batch.loss_weights)
        )
        self.ones = torch.ones(self.B * self.C, dtype=self.wide, device=batch.x.device)
        self.carried_factors = batch.carried_factors.to(batch.x.dtype)[..., None, None]  # (B, n, 1, 1)
        self.chunk_decay = 1.0 if config.decay is None else config.decay**self.C  # what is left after a chunk

    def forward(self) -> Tensor:
        """Losses (B, L) of every token by the weights as they are before its chunk."""
        raise NotImplementedError

    def learned(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each row has learned in this window before its chunk `last` (B,): changes of W1, W2 and the vectors."""
        raise NotImplementedError

    def backward(self) -> tuple[Tensor, Weights]:
        """Gradients of x (B, L, D) and of the weights, of the sum of losses times loss_weights."""
        raise NotImplementedError

    def slow(self) -> tuple[Tensor, Tensor, Weights]:
        """The losses (B, L) of the trained weights alone, which learn nothing.

        Returns them with the gradients of x and of the weights, of the sum of losses times slow_loss_weights.
        """
        return self._slow(self.batch.x, self.batch.labels, self.batch.slow_loss_weights)

    def _slow(self, x, labels, loss_weights):
        """`slow` for some tokens of each row: x (B, tokens, D), labels and loss_weights (B, tokens)."""
        weights, passes = self.weights, self.passes
        b1, b2, scale, shift = self._split(weights.vectors.expand(self.B, 1, -1))
        h, vector_gradients = x @ weights.W1, self._vector_workspace(x.shape[1])
        a = torch.empty_like(h)
        r = passes.hidden(h, b1, a)
        norm, features = passes.layer_norm(a @ weights.W2, b2, scale, shift, self.config.eps)
        flat, flat_labels = features.flatten(0, 1), labels.flatten()
        embedding, bias = weights.embedding, weights.embedding_bias
        log_sum, dn, dembedding, dbias = cross_entropy.score(
            flat, embedding, bias, flat_labels, loss_weights.flatten(), want_dn=True, want_dembedding=True
        )
        losses = cross_entropy.losses(flat, embedding, bias, flat_labels, log_sum).view(labels.shape)
        assert dn is not None
        assert dembedding is not None
        assert dbias is not None
        dy, dh = torch.empty_like(features), torch.empty_like(r)
        dfeatures = dn.view(features.shape).to(self.wide)
        passes.layer_norm_backward(dfeatures, norm, scale, None, dy, vector_gradients)
        passes.hidden_backward(dy @ weights.W2.mT, r, None, dh, vector_gradients)
        dW1, dW2 = (torch.zeros_like(W, dtype=self.wide) for W in (weights.W1, weights.W2))
        add_token_products(dW1, x, dh)
        add_token_products(dW2, a, dy)
        dvectors = vector_gradients.sum((0, 1), dtype=self.wide)
        gradients = Weights(dW1, dW2, dvectors, torch.zeros_like(weights.e), dembedding, dbias)
        return losses, dh @ weights.W1.mT, gradients

    def _step_gradients(self, dot_products, dchanges, gradient_sums):
        """The gradient of e (6,).

        Args:
            dot_products: (2, n, B, C), dv1 . g1 and dv2 . g2 of every token.
            dchanges: (B, n, F + 3 E), gradients of what each chunk adds to the vectors, which is ...
            gradient_sums: (B, n, F + 3 E), ... minus the steps times these sums over its tokens.
        """
        first, second = dot_products.flatten(1).sum(1)
        b1, b2, scale, shift = (y.sum() for y in self._split(dchanges * gradient_sums))
        return -torch.stack([first, b1, second, b2, scale, shift])

    def _split(self, vectors):
        """bias1, bias2, scale and shift, from vectors (..., F + 3 E)."""
        return vectors.split([self.F, self.E, self.E, self.E], -1)

    def _workspace(self, width, length=None, dtype=None):
        """An uninitialised tensor (B, length, width): a row per token (the default, L), or per chunk with length = n.

        It is 0 in the last chunk: that chunk writes nothing there, and factors of 0 do not take away a NaN.
        """
        out = self.batch.x.new_empty(self.B, length or self.L, width, dtype=dtype)
        out[:, self.L - self.C if length is None else length - 1 :] = 0
        return out

    def _vector_workspace(self, length=None):
        """An uninitialised tensor (B, length, F + 3 E) for the vector gradients of a chunk, or of `length` tokens."""
        return self.batch.x.new_empty(self.B, length or self.C, self.F + 3 * self.E)


def add_token_products(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a^T b (width of a, width of b), over all tokens of a and b (B, L, width)."""
    cross_entropy.add_product(out, a.flatten(0, 1).mT, b.flatten(0, 1))


def passes_for(x: Tensor, config: FWLConfig) -> Any:
    """The module of elementwise passes for x: dual_passes.py, or kernels/fwl_dual.py on a GPU, which does not clip."""
    if config.clip is not None or x.dtype == torch.float64 or not cross_entropy.on_gpu(x):
        return dual_passes
    from fastweights.torch.kernels import fwl_dual

    return fwl_dual
