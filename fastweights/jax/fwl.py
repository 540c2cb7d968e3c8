"""Fast Weight Layers for Flax (the mathematics is in fastweights/fwl.py)."""

from dataclasses import KW_ONLY, fields
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fastweights import fwl, fwl_checks, fwl_config, refresh, refresh_run
from fastweights.core import FastWeightError
from fastweights.fwl_config import FWLOutput, FWLState
from fastweights.jax.dtypes import accumulation_dtype
from fastweights.jax.framework import OPS
from fastweights.jax.ops import _values
from fastweights.literals import Normalizer, Rule, Within
from fastweights.refresh import RefreshState


class FWLBlock(nn.Module):
    """A Fast Weight Layer (Clark et al. 2022): an output block that learns from the document it reads.

        >>> from fastweights.jax import make_labels
        >>> block = FWLBlock(16, vocab_size=50)
        >>> tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 50)
        >>> labels, weights = make_labels(tokens)
        >>> x = jnp.ones((2, 12, 8))                                       # (B, T, D) from any causal body
        >>> variables = block.init(jax.random.key(1), x, labels, weights)
        >>> logits = block.apply(variables, x, labels, weights)

    The logits at token t come from the block's parameters minus step sizes times the gradients of the losses of the
    tokens before t. Training through them teaches parameters that learn well from a document. Every other method is
    called with its name: `block.apply(variables, x, labels, weights, method="loss")`. It differentiates in reverse
    mode. Its products are as precise as `jax.default_matmul_precision` says, which on recent GPUs is TF32 unless you
    ask for more.

    Args:
        size: width of the block's output; its hidden layer is `hidden`, 4 * size when absent.
        vocab_size: number of labels.
        attn_chunks: pieces the sequence is cut into for speed (any length); chosen when absent. Changes no result.
        inputs: width of x; taken from the first call when absent.
        normalizer: what the summed losses are divided by before their gradient is taken: "batch" (published: all
            weights of the batch), "sequence" (those of a token's own sequence), or a number of tokens, with which
            updates depend on nothing but the past: batches, padding and streaming change nothing.
        step_size: initial value of the six learned step sizes, one per parameter tensor.
        fast_bias, shared_norm_step: False and True give the published JAX form, the defaults its TensorFlow form.
        rule: "sum" adds up the gradients; "delta" lets a write replace what its input retrieves.
        decay: share of the fast weights kept per token; all when absent.
        clip: largest length of a token's gradient at each layer.
        first_order: cut the second-order part of the training gradient (the steps still learn).
        eps: of the layer norm.
        refresh: tokens after which gradients are taken at the weights as they have become: they then correct what was
            learned, so that nothing need decay. None for the published layer, whose gradients are those of the
            trained weights and add up.
        within: how the tokens between two refreshes are answered: "held", with the weights as they were at the first
            of them (dynamic evaluation of this block), or "cumulative", as the published layer does.
        log_steps: the parameter `steps` holds the logarithms of the steps, which then stay positive.
        unembed: an `nn.Embed(vocab_size, size)` whose embedding to share; its own when absent.
        bias: whether the output embedding has a bias; when absent, only if it is the block's own.
        dtype: of the computation; that of the input and the parameters together when absent.
        param_dtype: of the parameters.
    """

    size: int
    vocab_size: int
    attn_chunks: int | None = None
    _: KW_ONLY
    inputs: int | None = None
    hidden: int | None = None
    normalizer: Normalizer | float = "batch"
    step_size: float = 0.01
    fast_bias: bool = True
    shared_norm_step: bool = False
    rule: Rule = "sum"
    decay: float | None = None
    clip: float | None = None
    first_order: bool = False
    eps: float = 1e-6
    refresh: int | None = None
    within: Within = "held"
    log_steps: bool = False
    unembed: nn.Embed | None = None
    bias: bool | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        self.config  # noqa: B018 - its checks
        if self.unembed is not None:
            got = self.unembed.num_embeddings, self.unembed.features
            if got != (self.vocab_size, self.size):
                raise FastWeightError(
                    f"unembed has shape {got}; expected ({self.vocab_size}, {self.size}): "
                    "(vocab_size, size), as nn.Embed(vocab_size, size)"
                )
        super().__post_init__()

    @property
    def config(self) -> fwl_config.FWLConfig:
        """What the block is, for every framework."""
        return fwl_config.FWLConfig(**{f.name: getattr(self, f.name) for f in fields(fwl_config.FWLConfig)})

    def __call__(self, x: Array, labels: Array, weights: Array) -> Array:
        """Fast logits (B, T, V), in parallel over tokens: what training and scoring a whole text need.

        Args:
            x: (B, T, D), output of a causal body.
            labels: (B, T) next tokens, or one-hot (B, T, V); what a token's loss is measured against after it was
                answered.
            weights: (B, T), 0 where a token has no label; `make_labels` makes both.
        """
        return self.run(x, labels, weights).logits

    def run(
        self,
        x: Array,
        labels: Array,
        weights: Array,
        state: Any = None,
        *,
        previous_label: Array | None = None,
        cu_seqlens: Array | None = None,
        logits: bool = True,
    ) -> FWLOutput:
        """Logits, per-token loss of both passes and the state after x.

        Args:
            x, labels, weights: as for a call.
            state: from an earlier call, to go on with the same document: an FWLState, or a RefreshState with `refresh`.
            previous_label: (B,) label of the last token of the part before, which waits in the state as its label was
                not known: the first token of this part. It is learned first, with weight 1. When absent, that token is
                never learned, unless its label was given, with a weight, in the part before.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row.
            logits: False leaves them None and holds a block of the vocabulary at a time.

        Returns:
            An `FWLOutput`. Where loss is below slow_loss, learning from the document has helped.
        """
        x, labels, weights = self._checked(x, labels, weights)
        cu_seqlens = self._offsets(x, cu_seqlens)
        sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
        if state is not None:
            self._check_state(state, sequences, x.shape[-1])
        if previous_label is not None:
            previous_label = self._previous(jnp.asarray(previous_label), state)
        if self.refresh is not None:
            return self._refreshed(x, labels, weights, state, sequences, previous_label, cu_seqlens, logits)
        return fwl.forward(
            self.config,
            OPS,
            self._weights(x),
            x,
            labels,
            weights,
            state,
            previous_label=previous_label,
            cu_seqlens=cu_seqlens,
            logits=logits,
        )

    def loss(self, x: Array, labels: Array, weights: Array, *, cu_seqlens: Array | None = None) -> Array:
        """The training loss, the weighted mean over tokens, without ever holding the logits.

        Args:
            x: (B, T, D), output of a causal body.
            labels, weights: (B, T); `make_labels` makes both.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row.
        """
        if self.refresh is None:
            x, labels, weights = self._checked(x, labels, weights)
            cu_seqlens = self._offsets(x, cu_seqlens)
            return fwl.objective(self.config, OPS, self._weights(x), x, labels, weights, cu_seqlens)
        out = self.run(x, labels, weights, cu_seqlens=cu_seqlens, logits=False)
        weights = jnp.asarray(weights, out.loss.dtype)
        return jnp.sum(out.loss * weights) / jnp.maximum(jnp.sum(weights), 1e-8)

    def slow_logits(self, x: Array) -> Array:
        """Logits (B, T, V) of the parameters as they are, that have learned nothing from the document."""
        x = self._input(x)
        p = self._weights(x)
        return fwl.slow_pass(self.config, OPS, p, x).n @ p["unembed"] + p["unembed_bias"]

    @nn.nowrap
    def init_state(self, batch: int) -> Any:
        """The state before the first token, for `step`.

        With `inputs` given, `block.init_state(2)`; else `block.apply(variables, 2, method="init_state")`.
        """
        c, inputs, dtype = self.config, self.inputs, self.dtype or self.param_dtype
        if self.scope is not None and self.has_variable("params", "dense1"):
            inputs = self.get_variable("params", "dense1").shape[0]
        if inputs is None:
            raise FastWeightError(
                "inputs is not known yet; expected FWLBlock(..., inputs=D) or "
                'block.apply(variables, batch, method="init_state")'
            )
        if c.refresh is not None:
            dtypes = dict(wide=accumulation_dtype(dtype), input=dtype, whole=jnp.int32)
            return refresh.initial(c, inputs, batch, lambda shape, kind: jnp.zeros(shape, dtypes[kind]))
        zeros = lambda *shape: jnp.zeros((batch, *shape), accumulation_dtype(dtype))  # noqa: E731
        return FWLState(
            zeros(1, inputs + 1, c.hidden_width),
            zeros(1, c.hidden_width + 1, c.size),
            zeros(1, 1, 2 * c.size),
            zeros(inputs).astype(dtype),
            zeros(),
        )

    def step(
        self, x: Array, previous_label: Array | None, state: Any, weight: Array | None = None
    ) -> tuple[Array, Any]:
        """Logits (B, V) and the state for the next token x (B, D): a stream, token by token.

        A stream does not know how many tokens it will have, so `normalizer` must be a number.

        Args:
            x: (B, D).
            previous_label: (B,) label of the token before x, learned from now; None at the first token.
            state: what the last call returned, or `init_state(B)`.
            weight: (B,) of previous_label; 1 when absent, 0 leaves it unlearned.
        """
        if isinstance(self.normalizer, str):
            raise FastWeightError(
                f"normalizer is {self.normalizer!r}; expected a number of tokens for step: "
                "a stream does not know how many tokens will follow"
            )
        x, state = jnp.asarray(x), (FWLState if self.refresh is None else RefreshState)(*state)
        self._check_state(state, len(x), x.shape[-1])
        if previous_label is None:
            previous_label, weight = jnp.zeros(len(x), jnp.int32), jnp.zeros(len(x))
        weight = jnp.ones(len(x)) if weight is None else jnp.asarray(weight)
        x, label, weight = self._checked(x[:, None], jnp.asarray(previous_label)[:, None], weight[:, None])
        if self.refresh is not None:
            state = refresh.labelled(self.config, OPS, state, label[:, 0], weight[:, 0])
            out = self._refreshed(x, label * 0, weight * 0, state, len(x), None, None, True)
            return out.logits[:, 0], out.state
        return fwl.step(self.config, OPS, self._weights(x), x[:, 0], label[:, 0], weight[:, 0], state)

    def _refreshed(self, x, labels, weights, state, sequences, previous_label, cu_seqlens, logits):
        """`run` of a refreshed block, once its arguments are checked; its loop over chunks is a scan."""
        p = self._weights(x)
        fresh = state is None
        if fresh:
            dtypes = dict(wide=accumulation_dtype(x), input=x.dtype, whole=jnp.int32)
            zeros = lambda shape, kind: jnp.zeros(shape, dtypes[kind])  # noqa: E731
            state = refresh.initial(self.config, x.shape[-1], sequences, zeros)
        if previous_label is not None:
            state = refresh.labelled(self.config, OPS, state, previous_label, jnp.ones(len(previous_label)))
        share = weights / fwl.normalization(self.config, OPS, weights, cu_seqlens)
        return refresh_run.run(
            self.config,
            OPS,
            p,
            x,
            labels,
            share,
            RefreshState(*state),
            loop=jax.lax.scan,
            fresh=fresh,
            cu_seqlens=cu_seqlens,
            logits=logits,
        )

    @nn.nowrap
    def _check_state(self, state, sequences, inputs):
        """Raise FastWeightError unless the state is one of this block's, of as many sequences."""
        check = fwl_checks.check_state if self.refresh is None else refresh.check_state
        check(self.config, state, sequences, inputs)

    @nn.compact
    def _weights(self, x):
        """The parameters, by name, in the dtype of x."""
        shapes = self.config.shapes(x.shape[-1])
        own_bias = self.unembed is None if self.bias is None else self.bias
        p = {"unembed_bias": jnp.zeros(self.vocab_size, x.dtype)}
        for name, shape in shapes.items():
            if (name == "unembed" and self.unembed is not None) or (name == "unembed_bias" and not own_bias):
                continue
            p[name] = self.param(name, self._initial, name, shape).astype(x.dtype)
        if self.unembed is not None:
            p["unembed"] = self.unembed.embedding.T.astype(x.dtype)
        return p

    @nn.nowrap
    def _initial(self, key, name, shape):
        """The initial value of one parameter: matrices of variance 1 / in, steps at `step_size`."""
        if len(shape) == 2:
            return jax.random.normal(key, shape, self.param_dtype) * shape[0] ** -0.5
        return jnp.full(shape, dict(scale=1.0, steps=self.config.initial_step).get(name, 0.0), self.param_dtype)

    def _input(self, x):
        """x in the dtype of the computation."""
        x = jnp.asarray(x)
        return x.astype(self.dtype or jnp.result_type(x, self.param_dtype))

    @nn.nowrap
    def _offsets(self, x, cu_seqlens):
        """Offsets of packed documents, checked, their values where there are any yet; or None."""
        if cu_seqlens is None:
            return None
        cu_seqlens = jnp.asarray(cu_seqlens)
        offsets = _values(cu_seqlens)
        fwl_checks.check_packed(x, cu_seqlens, None if offsets is None else offsets.tolist())
        return cu_seqlens

    def _previous(self, label, state):
        """The labels of waiting tokens, checked."""
        fwl_checks.check_previous(self.config, label, state)
        x = jnp.zeros((len(label), 1, state.pending.shape[-1]), state.pending.dtype)
        return self._checked(x, label[:, None], jnp.ones((len(label), 1)))[1][:, 0]

    def _checked(self, x, labels, weights):
        """x, integer labels and weights, checked; their values where there are any yet."""
        x = self._input(x)
        labels, weights = jnp.asarray(labels), jnp.asarray(weights, accumulation_dtype(x))
        inputs = self.inputs
        if self.has_variable("params", "dense1"):
            inputs = self.get_variable("params", "dense1").shape[0]
        fwl_checks.check_shapes(self.config, x, labels, weights, inputs)
        if labels.ndim == 3:
            labels = jnp.argmax(labels, -1)
        found, w = _values(labels), _values(weights)
        if found is not None and w is not None and found.size:
            bad = w[~((w >= 0) & np.isfinite(w))]
            fwl_checks.check_values(self.config, int(found.min()), int(found.max()), float(bad[0]) if len(bad) else 0.0)
        return x, labels, weights

    def __repr__(self) -> str:
        return f"FWLBlock({self.config.summary})"
