"""Fast Weight Layers for Keras, on TensorFlow, JAX and torch (the mathematics is in fastweights/fwl.py)."""

from dataclasses import asdict
from typing import Any

import keras
import numpy as np
from keras import KerasTensor, ops

from fastweights import fwl, fwl_checks, fwl_config, refresh, refresh_run
from fastweights.core import FastWeightError
from fastweights.debugging import debugging
from fastweights.fwl_config import FWLOutput, FWLState
from fastweights.keras.dtypes import Tensor, accumulation_dtype
from fastweights.keras.framework import OPS
from fastweights.keras.ops import _values
from fastweights.keras.parameters import add_parameter, random_generator
from fastweights.literals import Normalizer, Rule, Within
from fastweights.refresh import RefreshState


@keras.saving.register_keras_serializable(package="fastweights")
class FWLBlock(keras.layers.Layer):
    """A Fast Weight Layer (Clark et al. 2022): an output block that learns from the document it reads.

        >>> from fastweights.keras import make_labels
        >>> block = FWLBlock(16, vocab_size=50)
        >>> tokens = keras.random.randint((2, 12), 0, 50)
        >>> labels, weights = make_labels(tokens)
        >>> logits = block(keras.random.normal((2, 12, 8)), labels, weights)   # x (B, T, D) from any causal body

    The logits at token t come from the block's parameters minus step sizes times the gradients of the losses of the
    tokens before t. Training through them teaches parameters that learn well from a document.

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
        unembed: a `keras.layers.Embedding(vocab_size, size)` whose weights to share; its own when absent.
        bias: whether the output embedding has a bias; when absent, only if it is the block's own.
        name, trainable, dtype: as for any Keras layer; `dtype` may be a policy such as "mixed_bfloat16".
    """

    def __init__(
        self,
        size: int,
        vocab_size: int,
        attn_chunks: int | None = None,
        *,
        inputs: int | None = None,
        hidden: int | None = None,
        normalizer: Normalizer | float = "batch",
        step_size: float = 0.01,
        fast_bias: bool = True,
        shared_norm_step: bool = False,
        rule: Rule = "sum",
        decay: float | None = None,
        clip: float | None = None,
        first_order: bool = False,
        eps: float = 1e-6,
        refresh: int | None = None,
        within: Within = "held",
        log_steps: bool = False,
        unembed: keras.layers.Embedding | None = None,
        bias: bool | None = None,
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
    ):
        super().__init__(name=name, trainable=trainable, dtype=dtype, autocast=False)  # the state stays wide
        self.config = fwl_config.FWLConfig(
            size,
            vocab_size,
            attn_chunks,
            hidden=hidden,
            normalizer=normalizer,
            step_size=step_size,
            fast_bias=fast_bias,
            shared_norm_step=shared_norm_step,
            rule=rule,
            decay=decay,
            clip=clip,
            first_order=first_order,
            eps=eps,
            refresh=refresh,
            within=within,
            log_steps=log_steps,
        )
        if unembed is not None and (unembed.input_dim, unembed.output_dim) != (vocab_size, size):
            got = unembed.input_dim, unembed.output_dim
            raise FastWeightError(
                f"unembed has shape {got}; expected ({vocab_size}, {size}): (vocab_size, size), as "
                "Embedding(vocab_size, size)"
            )
        self.inputs, self.unembed, self.bias = inputs, unembed, bias
        self.supports_jit = keras.backend.backend() != "tensorflow"  # see fast_weight
        self.supports_masking = True  # weights say what is padding; a mask of x goes on to the loss

    def build(self, input_shape: Any = None) -> None:
        """Make the weights; of the shape of x its last number matters, unless `inputs` was given."""
        inputs = self.inputs if input_shape is None else input_shape[-1]
        if inputs is None:
            raise FastWeightError("inputs is not known yet; expected FWLBlock(..., inputs=D), or one call before this")
        if self.inputs not in (None, inputs):
            raise FastWeightError(
                f"x has shape {tuple(input_shape)}; expected (B, T, {self.inputs}): inputs is {self.inputs}"
            )
        initial = self.config.initial(inputs, random_generator())
        if self.unembed is not None:
            del initial["unembed"]
            if not self.unembed.built:
                self.unembed.build(None)
        if not (self.unembed is None if self.bias is None else self.bias):
            del initial["unembed_bias"]
        self.slow_weights = {name: add_parameter(self, name, value) for name, value in initial.items()}

    def call(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
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
        x: Tensor,
        labels: Tensor,
        weights: Tensor,
        state: Any = None,
        *,
        previous_label: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
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
        if state is not None:
            sequences = x.shape[0]
            if cu_seqlens is not None:
                sequences = None if cu_seqlens.shape[0] is None else cu_seqlens.shape[0] - 1
            self._check_state(state, sequences, x.shape[-1])
        if previous_label is not None:
            previous_label = self._previous(ops.convert_to_tensor(previous_label), state)
        if self.config.refresh is not None:
            return self._refreshed(x, labels, weights, state, previous_label, cu_seqlens, logits)
        return fwl.forward(
            self.config,
            OPS,
            self._weights(),
            x,
            labels,
            weights,
            state,
            previous_label=previous_label,
            cu_seqlens=cu_seqlens,
            logits=logits,
        )

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """The training loss, the weighted mean over tokens, without ever holding the logits."""
        if self.config.refresh is None:
            x, labels, weights = self._checked(x, labels, weights)
            cu_seqlens = self._offsets(x, cu_seqlens)
            return fwl.objective(self.config, OPS, self._weights(), x, labels, weights, cu_seqlens)
        out = self.run(x, labels, weights, cu_seqlens=cu_seqlens, logits=False)
        weights = ops.cast(weights, out.loss.dtype)
        total = ops.sum(weights)
        return ops.sum(out.loss * weights) / ops.where(total > 1e-8, total, 1e-8)

    def slow_logits(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) of the parameters as they are, that have learned nothing from the document."""
        x = self._input(x)
        p = self._weights()
        return OPS.matmul(fwl.slow_pass(self.config, OPS, p, x).n, p["unembed"]) + p["unembed_bias"]

    def init_state(self, batch: int) -> Any:
        """The state before the first token of `batch` sequences, for `step`: nothing learned, nothing waiting."""
        if not self.built:
            self.build(None)
        c, inputs, dtype = self.config, self.slow_weights["dense1"].shape[0], self.compute_dtype
        if c.refresh is not None:
            return self._initial(batch)
        zeros = lambda *shape: ops.zeros((batch, *shape), accumulation_dtype(dtype))  # noqa: E731
        return FWLState(
            zeros(1, inputs + 1, c.hidden_width),
            zeros(1, c.hidden_width + 1, c.size),
            zeros(1, 1, 2 * c.size),
            ops.cast(zeros(inputs), dtype),
            zeros(),
        )

    def step(
        self, x: Tensor, previous_label: Tensor | None, state: Any, weight: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Logits (B, V) and the state for the next token x (B, D): a stream, token by token.

        A stream does not know how many tokens it will have, so `normalizer` must be a number.

        Args:
            x: (B, D).
            previous_label: (B,) label of the token before x, learned from now; None at the first token.
            state: what the last call returned, or `init_state(B)`.
            weight: (B,) of previous_label; 1 when absent, 0 leaves it unlearned.
        """
        if isinstance(self.config.normalizer, str):
            raise FastWeightError(
                f"normalizer is {self.config.normalizer!r}; expected a number of tokens for step: "
                "a stream does not know how many tokens will follow"
            )
        x, state = ops.convert_to_tensor(x), (FWLState if self.config.refresh is None else RefreshState)(*state)
        self._check_state(state, x.shape[0], x.shape[-1])
        if previous_label is None:
            previous_label, weight = ops.zeros_like(state.waiting, dtype="int32"), ops.zeros_like(state.waiting)
        weight = ops.ones_like(state.waiting) if weight is None else ops.convert_to_tensor(weight)
        label = ops.convert_to_tensor(previous_label)[:, None]
        x, label, weight = self._checked(x[:, None], label, weight[:, None])
        if self.config.refresh is not None:
            state = refresh.labelled(self.config, OPS, state, label[:, 0], weight[:, 0])
            out = self._refreshed(x, label * 0, weight * 0, state, None, None, True)
            return out.logits[:, 0], out.state
        return fwl.step(self.config, OPS, self._weights(), x[:, 0], label[:, 0], weight[:, 0], state)

    def compute_output_spec(self, x, labels, weights):
        """Shape and dtype of the logits, for a functional model."""
        fwl_checks.check_shapes(self.config, x, labels, weights, self.inputs)
        return KerasTensor((*x.shape[:2], self.config.vocab_size), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this block again, for saving; a shared embedding is saved with it."""
        arguments = dict(inputs=self.inputs, bias=self.bias)
        if self.unembed is not None:
            arguments["unembed"] = keras.saving.serialize_keras_object(self.unembed)
        return super().get_config() | asdict(self.config) | arguments

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FWLBlock":
        """The block that `get_config` describes."""
        if config.get("unembed") is not None:
            config = config | {"unembed": keras.saving.deserialize_keras_object(config["unembed"])}
        return cls(**config)

    def __repr__(self) -> str:
        return f"FWLBlock({self.config.summary})"

    def _refreshed(self, x, labels, weights, state, previous_label, cu_seqlens, logits):
        """`run` of a refreshed block, once its arguments are checked."""
        if x.shape[1] is None:
            raise FastWeightError(
                f"x has shape {tuple(x.shape)}; expected a length that is known for refresh="
                f"{self.config.refresh}: chunks are counted while the graph is built"
            )
        fresh = state is None
        if fresh:
            state = self._initial(ops.shape(x)[0] if cu_seqlens is None else ops.shape(cu_seqlens)[0] - 1)
        if previous_label is not None:
            state = refresh.labelled(self.config, OPS, state, previous_label, ops.ones_like(previous_label))
        share = weights / fwl.normalization(self.config, OPS, weights, cu_seqlens)
        return refresh_run.run(
            self.config,
            OPS,
            self._weights(),
            x,
            labels,
            share,
            RefreshState(*state),
            loop=_loop,
            fresh=fresh,
            cu_seqlens=cu_seqlens,
            logits=logits,
        )

    def _initial(self, batch):
        """The state of a refreshed block before the first token."""
        inputs, dtype = self.slow_weights["dense1"].shape[0], self.compute_dtype
        dtypes = dict(wide=accumulation_dtype(dtype), input=dtype, whole="int32")
        return refresh.initial(self.config, inputs, batch, lambda shape, kind: ops.zeros(shape, dtypes[kind]))

    def _check_state(self, state, sequences, inputs):
        """Raise FastWeightError unless the state is one of this block's, of as many sequences."""
        check = fwl_checks.check_state if self.config.refresh is None else refresh.check_state
        check(self.config, state, sequences, inputs)

    def _weights(self):
        """The parameters, by name, in the dtype of the computation."""
        c, dtype = self.config, self.compute_dtype
        p = {"unembed_bias": ops.zeros((c.vocab_size,), dtype)}
        p |= {name: ops.cast(w, dtype) for name, w in self.slow_weights.items()}
        if self.unembed is not None:
            p["unembed"] = ops.transpose(ops.cast(self.unembed.embeddings, dtype))
        return p

    def _input(self, x):
        """x in the dtype of the computation; the first decides the width."""
        x = ops.cast(x, self.compute_dtype)
        if not self.built:
            self.build(tuple(x.shape))
        return x

    def _offsets(self, x, cu_seqlens):
        """Offsets of packed documents, checked, their values where there are any yet; or None."""
        if cu_seqlens is None:
            return None
        cu_seqlens = ops.convert_to_tensor(cu_seqlens)
        offsets = _values(cu_seqlens) if isinstance(x.shape[1], int) else None
        fwl_checks.check_packed(x, cu_seqlens, None if offsets is None else offsets.tolist())
        return ops.cast(cu_seqlens, "int32")

    def _previous(self, label, state):
        """The labels of waiting tokens, checked."""
        fwl_checks.check_previous(self.config, label, state)
        x = state.pending if self.config.refresh is None else state.pending[:, 0]
        return self._checked(x[:, None], label[:, None], ops.ones_like(state.waiting)[:, None])[1][:, 0]

    def _checked(self, x, labels, weights):
        """x, integer labels and weights, checked; their values where there are any yet."""
        x, labels = self._input(x), ops.convert_to_tensor(labels)
        weights = ops.cast(weights, accumulation_dtype(self.compute_dtype))
        fwl_checks.check_shapes(self.config, x, labels, weights, self.slow_weights["dense1"].shape[0])
        if len(labels.shape) == 3:
            labels = ops.argmax(labels, -1)
        if not getattr(labels, "is_cuda", False) or debugging():  # there it would wait for the device
            found, w = _values(labels), _values(weights)
            if found is not None and w is not None and found.size:
                bad = w[~((w >= 0) & np.isfinite(w))]
                worst = float(bad[0]) if len(bad) else 0.0
                fwl_checks.check_values(self.config, int(found.min()), int(found.max()), worst)
        return x, ops.cast(labels, "int32"), weights


def _loop(body, carry, parts):
    """body(carry, part) -> (carry, outputs) along the first axis: a scan on JAX, which compiles one chunk, not all."""
    if keras.backend.backend() == "jax":
        return ops.scan(body, carry, parts)
    found = []
    for i in range(parts[0].shape[0]):
        carry, outputs = body(carry, [x[i] for x in parts])
        found.append(outputs)
    return carry, [ops.stack(y) for y in zip(*found, strict=True)]
