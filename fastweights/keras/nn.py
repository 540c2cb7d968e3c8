"""Layers for Keras, on its TensorFlow, JAX and torch backends: batch first, state in and state out.

The parameters have the names and (in, out) shapes of `fastweights.attention.config.AttentionConfig.shapes`, as in every
framework; `export_parameters` and `import_parameters` carry them over.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from keras import KerasTensor, ops

from fastweights import attention
from fastweights.attention import AttentionState
from fastweights.attention.config import AttentionConfig
from fastweights.attention.presets import preset_arguments
from fastweights.keras.dtypes import Tensor, accumulation_dtype
from fastweights.keras.framework import OPS
from fastweights.keras.parameters import add_parameter, random_generator
from fastweights.literals import LayerNorm, Method, Rule


@keras.saving.register_keras_serializable(package="fastweights")
class FastWeightAttention(keras.layers.Layer):
    r"""A sequence mixer whose hidden state is a matrix per head, written and read token by token.

    It takes the place of self-attention in a block: the input is projected to queries, keys and values, every head
    keeps a memory S, and each token writes into it and reads from it,

    $$ S_t = a_t S_{t-1} + \beta_t \phi(k_t) (v_t - d\, (a_t S_{t-1})^\top \phi(k_t))^\top,
       \qquad o_t = S_t^\top \phi(q_t) $$

    with d = 1 for the delta rule and d = 0 for the sum. The outputs of all heads are normalised, gated where asked for,
    and projected back to `dim`. Time is linear in the number of tokens; the state does not grow with them.

        >>> layer = FastWeightAttention(64, heads=4)
        >>> y, state = layer(keras.random.normal((2, 10, 64)))         # (B, T, dim) -> (B, T, dim)
        >>> y, state = layer(keras.random.normal((2, 1, 64)), state)   # go on where it stopped

    Keras wants tensors in and out of a layer: parts of the state that this layer does not have are empty (None is
    taken as well). A mask that an earlier layer made, such as Embedding's, is used and passed on.

    Args:
        dim: width of the input and output.
        heads: number of memories.
        features: map of queries and keys: "identity", "relu", "silu", "elu+1", "dpfp-NU", "favor-M", or a function
            (..., d) -> (..., width), whose width is d unless it has an attribute `width`, a number or a function of d.
        rule: "delta" overwrites what a key retrieves; "sum" adds to it (linear attention).
        norm: of the features, as for `fast_weight`: "l2", "sum", "max", "hellinger" or "none"; or of the layer:
            "attention" (outputs are weighted means; also with the delta rule), "sum+attention" or "nlms" (docs/maths.md
            says what each is for).
        key_dim, value_dim: widths per head; dim / heads when absent.
        key_heads: heads of queries and keys, each shared by heads / key_heads memories; heads when absent.
        writes: keys, values and write rates per token, written one after the other (DeltaProduct).
        beta: True, learn a write rate per token and head; "value", one per value channel; "step", the step of the
            learned decay (Mamba-2); False, none; when absent, True for the delta rule only.
        beta_max: the largest write rate, up to 2 (negative eigenvalues).
        decay: "learned" per token and head (Gated DeltaNet), "channel" per key channel too (Kimi Delta Attention),
            "gla" (a root of a sigmoid per key channel), "rwkv-7" (never below 0.54), "retnet", a share kept per token,
            one for each head, or None.
        decay_rank: width of the vector from which a token's decays per channel are projected; the key width when
            absent, or 16 for "gla".
        erase: True learns, per key channel, how much of the key reads what is corrected (Gated DeltaNet-2); "removal"
            adds a write of its own that takes away what a removal key retrieves (RWKV-7); "feedback" lets a learned
            share of the key, one per head, read it before the decay, and takes that share from the query (Comba).
        conv: width of a causal convolution over q, k and v before the feature map; 0 for none.
        gate: multiply the output by SiLU of a projection of the input; "sigmoid", by that instead.
        out_norm: RMS norm over each head's output.
        seed: of FAVOR+'s random directions.
        redraw: in training, draw FAVOR+'s directions anew at each call; evaluation keeps the last ones.
        method, chunk_size: as for `fast_weight`.
        name, trainable, dtype: as for any Keras layer; `dtype` may be a policy such as "mixed_bfloat16".
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: str | Callable[[Tensor], Tensor] = "silu",
        rule: Rule = "delta",
        norm: LayerNorm = "l2",
        key_dim: int | None = None,
        value_dim: int | None = None,
        key_heads: int | None = None,
        writes: int = 1,
        beta: bool | str | None = None,
        beta_max: float = 1.0,
        decay: str | float | tuple[float, ...] | None = None,
        decay_rank: int | None = None,
        erase: bool | str = False,
        conv: int = 0,
        gate: bool | str = False,
        out_norm: bool = True,
        seed: int = 0,
        redraw: bool = False,
        method: Method = "auto",
        chunk_size: int | None = None,
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
    ):
        super().__init__(name=name, trainable=trainable, dtype=dtype, autocast=False)  # the state stays wide
        if isinstance(features, dict):  # what get_config makes of a function
            features = keras.saving.deserialize_keras_object(features)
        self.config = AttentionConfig(
            dim,
            heads,
            features=features,
            rule=rule,
            norm=norm,
            key_dim=key_dim,
            value_dim=value_dim,
            key_heads=key_heads,
            writes=writes,
            beta=beta,
            beta_max=beta_max,
            decay=tuple(decay) if isinstance(decay, list) else decay,
            decay_rank=decay_rank,
            erase=erase,
            conv=conv,
            gate=gate,
            out_norm=out_norm,
            seed=seed,
        )
        self.redraw, self.method, self.chunk_size = redraw, method, chunk_size
        self.supports_jit = keras.backend.backend() != "tensorflow"  # see fast_weight
        self.projection = self.draws = None

    @classmethod
    def preset(cls, name: str, dim: int, heads: int, **changes: Any) -> "FastWeightAttention":
        """The layer of a published model, with `changes` to its arguments.

        Args:
            name: one of `PRESETS`, whose values are the arguments, or a shorter name of it.
            dim, heads: as for the class.
            changes: arguments that are to differ from the published ones.

        Examples:
            >>> FastWeightAttention.preset("delta-network", dim=32, heads=2)
            FastWeightAttention(32, heads=2, features='dpfp-3', rule='delta', norm='sum', out_norm=False)
        """
        return cls(dim, heads, **preset_arguments(name, changes))

    def build(self, input_shape: Any = None) -> None:
        """Make the weights; the shape of the input does not matter."""
        initial = self.config.initial(random_generator())
        self.slow_weights = {name: add_parameter(self, name, value) for name, value in initial.items()}
        directions = self.config.projection()
        if directions is not None:
            self.projection = add_parameter(self, "projection", directions, trainable=False)
            self.draws = add_parameter(self, "draws", np.zeros((), "int32"), trainable=False)

    def call(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        training: bool | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """Read x and return what each token read from the memory, and the state after the last token.

        Args:
            x: (B, T, dim), or (1, T, dim) with `cu_seqlens`.
            state: what an earlier call returned; an empty memory when absent.
            cu_seqlens: (N + 1,) offsets of N texts packed into one row; each has its own state.
            mask: (B, T) bool, False for padding, which neither writes nor reads.
            training: whether `redraw` applies, as Keras says.

        Returns:
            y (B, T, dim), and an `AttentionState` of B texts (N where they are packed).
        """
        if self.redraw and training:
            self.draw()
        if mask is None and cu_seqlens is None:
            mask = getattr(x, "_keras_mask", None)  # which Keras hands over itself unless a state is given
        dtype = self.compute_dtype
        matrices = ("in_proj", "conv", "out_proj")  # the rates and the norm are used in float32 or wider
        weights = {
            n: ops.cast(w, dtype if n in matrices else accumulation_dtype(dtype)) for n, w in self.slow_weights.items()
        }
        layer = SimpleNamespace(**weights, projection=self.projection)
        layer.in_proj, layer.out_proj = (partial(_project, weights[n]) for n in ("in_proj", "out_proj"))
        y, state = attention.forward(
            self.config,
            OPS,
            layer,
            ops.cast(x, dtype),
            _absent_as_none(state),
            cu_seqlens=None if cu_seqlens is None else ops.convert_to_tensor(cu_seqlens),
            mask=None if mask is None else ops.convert_to_tensor(mask),
            method=self.method,
            chunk_size=self.chunk_size,
        )
        return y, self._absent_as_empty(state)

    def step(self, x: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState]:
        """One token: x (B, dim) -> y (B, dim) and the state."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def init_state(self, batch: int) -> AttentionState:
        """The empty state of `batch` texts that None stands for, as tensors."""
        return AttentionState(*(ops.zeros(shape, dtype) for shape, dtype in self._state(batch)))

    def draw(self) -> None:
        """Draw FAVOR+'s directions anew; the n-th draw of a seed is the same in every framework."""
        if not self.built:
            self.build()
        if self.projection is not None:
            self.draws.assign_add(1)
            self.projection.assign(_directions(self.config, ops.convert_to_tensor(self.draws), self.projection.dtype))

    def compute_output_spec(self, x, state=None, cu_seqlens=None, mask=None, training=None):
        """Shapes and dtypes of what `call` returns, for a functional model."""
        attention.check_input(self.config, x, state, mask)
        batch = x.shape[0]
        if cu_seqlens is not None:
            batch = None if cu_seqlens.shape[0] is None else cu_seqlens.shape[0] - 1
        state = AttentionState(*(KerasTensor(shape, dtype) for shape, dtype in self._state(batch)))
        return KerasTensor(x.shape, self.compute_dtype), state

    def compute_mask(self, inputs, previous_mask):
        """The mask of x is that of y."""
        return [previous_mask]  # of y; a state has none

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this layer again, for saving."""
        arguments = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        arguments |= dict(redraw=self.redraw, method=self.method, chunk_size=self.chunk_size)
        if callable(self.config.features):
            arguments["features"] = keras.saving.serialize_keras_object(self.config.features)
        return super().get_config() | arguments

    def __repr__(self) -> str:
        return f"FastWeightAttention({self.config.dim}, heads={self.config.heads}, {self.config.describe()})"

    def _state(self, batch):
        """Shape and dtype of each part of the state; an absent one has an axis of length 0."""
        c, dtype = self.config, self.compute_dtype
        key = c.feature_width
        yield (batch, c.heads, key, c.value_width), accumulation_dtype(dtype)
        yield (batch, c.heads, key if c.attention_norm else 0), accumulation_dtype(dtype)
        yield (batch, c.conv - 1 if c.conv else 0, c.channels), dtype

    def _absent_as_empty(self, state):
        """The state with empty tensors where the layer has no such part: Keras takes no None for an output."""
        B = ops.shape(state.memory)[0]
        return AttentionState(
            *(
                ops.zeros(shape, dtype) if part is None else part
                for part, (shape, dtype) in zip(state, self._state(B), strict=True)
            )
        )


def _project(weight, x):
    """x (..., in) times weight (in, out)."""
    return OPS.matmul(x, weight)


def _absent_as_none(state):
    """The inverse: parts with an axis of length 0 become None again."""
    if state is None or len(state) != 3:  # the latter raises where the input is checked
        return state
    return AttentionState(*(None if part is None or 0 in tuple(part.shape)[1:] else part for part in state))


def _directions(config, draw, dtype):
    """FAVOR+'s directions of a draw; NumPy is called back from compiled code."""
    shape = config.phi.size, config.key_width
    numbers = lambda n: config.projection(int(n)).astype(dtype)  # noqa: E731
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if not tf.executing_eagerly():
            return tf.ensure_shape(tf.numpy_function(numbers, [draw], dtype), shape)
    if keras.backend.backend() == "jax":
        import jax

        if isinstance(draw, jax.core.Tracer):
            return jax.pure_callback(numbers, jax.ShapeDtypeStruct(shape, dtype), draw, vmap_method="sequential")
    return numbers(ops.convert_to_numpy(draw))
