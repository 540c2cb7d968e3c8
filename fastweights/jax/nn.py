"""Layers for Flax (flax.linen): batch first, state in and state out, no hidden mutation.

The parameters have the names and (in, out) shapes of `fastweights.attention.config.AttentionConfig.shapes`, as in every
framework; `export_parameters` and `import_parameters` carry them over.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import Array

from fastweights import attention
from fastweights.attention import AttentionState
from fastweights.attention.config import AttentionConfig
from fastweights.attention.presets import preset_arguments
from fastweights.core import FastWeightError
from fastweights.jax.dtypes import accumulation_dtype
from fastweights.jax.framework import OPS
from fastweights.literals import LayerNorm, Method, Rule


class FastWeightAttention(nn.Module):
    r"""A sequence mixer whose hidden state is a matrix per head, written and read token by token.

    It takes the place of self-attention in a block: the input is projected to queries, keys and values, every head
    keeps a memory S, and each token writes into it and reads from it,

    $$ S_t = a_t S_{t-1} + \beta_t \phi(k_t) (v_t - d\, (a_t S_{t-1})^\top \phi(k_t))^\top,
       \qquad o_t = S_t^\top \phi(q_t) $$

    with d = 1 for the delta rule and d = 0 for the sum. The outputs of all heads are normalised, gated where asked for,
    and projected back to `dim`. Time is linear in the number of tokens; the state does not grow with them.

        >>> layer = FastWeightAttention(64, heads=4)
        >>> x = jnp.ones((2, 10, 64))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> y, state = layer.apply(variables, x)                 # (B, T, dim) -> (B, T, dim)
        >>> y, state = layer.apply(variables, x[:, :1], state)   # go on where it stopped

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
        seed: of FAVOR+'s random directions, which are in the collection "constants"; `redraw` draws them anew.
        method, chunk_size: as for `fast_weight`.
        dtype: of the computation; that of the input and the parameters together when absent.
        param_dtype: of the parameters.
    """

    dim: int
    heads: int
    _: KW_ONLY
    features: str | Callable[[Array], Array] = "silu"
    rule: Rule = "delta"
    norm: LayerNorm = "l2"
    key_dim: int | None = None
    value_dim: int | None = None
    key_heads: int | None = None
    writes: int = 1
    beta: bool | str | None = None
    beta_max: float = 1.0
    decay: str | float | tuple[float, ...] | None = None
    decay_rank: int | None = None
    erase: bool | str = False
    conv: int = 0
    gate: bool | str = False
    out_norm: bool = True
    seed: int = 0
    method: Method = "auto"
    chunk_size: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        self.config  # noqa: B018 - its checks
        super().__post_init__()

    @property
    def config(self) -> AttentionConfig:
        """What the layer is, for every framework."""
        return AttentionConfig(**{f.name: getattr(self, f.name) for f in fields(AttentionConfig)})

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

    @nn.compact
    def __call__(
        self,
        x: Array,
        state: AttentionState | None = None,
        *,
        cu_seqlens: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, AttentionState]:
        """Read x and return what each token read from the memory, and the state after the last token.

        Args:
            x: (B, T, dim), or (1, T, dim) with `cu_seqlens`.
            state: what an earlier call returned; an empty memory when absent.
            cu_seqlens: (N + 1,) offsets of N texts packed into one row; each has its own state.
            mask: (B, T) bool, False for padding, which neither writes nor reads.

        Returns:
            y (B, T, dim), and an `AttentionState` of B texts (N where they are packed).
        """
        config, x = self.config, jnp.asarray(x)
        dtype = self.dtype or jnp.result_type(x, self.param_dtype)
        layer = SimpleNamespace(**{name: self._parameter(name, config, dtype) for name in config.shapes})
        layer.in_proj, layer.out_proj = partial(_project, layer.in_proj), partial(_project, layer.out_proj)
        layer.projection = self._constants(config) if config.phi.random else None
        cu_seqlens, mask = (None if a is None else jnp.asarray(a) for a in (cu_seqlens, mask))
        return attention.forward(
            config,
            OPS,
            layer,
            x.astype(dtype),
            state,
            cu_seqlens=cu_seqlens,
            mask=mask,
            method=self.method,
            chunk_size=self.chunk_size,
        )

    def _parameter(self, name, config, dtype):
        """A parameter in the dtype that it is used in: the rates and the norm in float32 or wider."""
        wide = accumulation_dtype(self.param_dtype)

        def initial(key):
            uniform = lambda low, high, shape: jax.random.uniform(key, shape, wide, low, high)  # noqa: E731
            return config.initial_value(name, uniform, jnp).astype(self.param_dtype)

        matrix = name in ("in_proj", "conv", "out_proj")
        return self.param(name, initial).astype(dtype if matrix else accumulation_dtype(dtype))

    def _constants(self, config):
        """FAVOR+'s directions; beside them, the number of the draw that they are."""
        wide = accumulation_dtype(self.param_dtype)
        projection = self.variable("constants", "projection", lambda: jnp.asarray(config.projection(), wide))
        self.variable("constants", "draws", lambda: jnp.zeros((), jnp.int32))
        return projection.value

    def step(self, x: Array, state: AttentionState | None = None) -> tuple[Array, AttentionState]:
        """One token: x (B, dim) -> y (B, dim) and the state.  `layer.apply(variables, x, state, method="step")`."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    @nn.nowrap
    def init_state(self, batch: int) -> AttentionState:
        """The state that None stands for, for an input of `dtype` (`param_dtype` when that is absent)."""
        c, dtype = self.config, self.dtype or self.param_dtype
        memory = jnp.zeros((batch, c.heads, c.feature_width, c.value_width), accumulation_dtype(dtype))
        z = memory[..., 0] if c.attention_norm else None
        return AttentionState(memory, z, jnp.zeros((batch, c.conv - 1, c.channels), dtype) if c.conv else None)

    def __repr__(self) -> str:
        return f"FastWeightAttention({self.dim}, heads={self.heads}, {self.config.describe()})"


def _project(weight, x):
    """x (..., in) times weight (in, out)."""
    return x @ weight


def redraw(variables: Mapping[str, Any], config: AttentionConfig, draw: int | Array) -> dict[str, Any]:
    """`variables` with FAVOR+'s directions drawn anew; the n-th draw of a seed is the same in every framework.

        >>> layer = FastWeightAttention.preset("performer", dim=64, heads=4)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 10, 64)))
        >>> variables = redraw(variables, layer.config, 1)       # in training; evaluation keeps the last ones

    Args:
        variables: of a layer, or of a model that has such layers anywhere in it.
        config: of the layer; other layers' directions are left alone where their shape differs.
        draw: its number, such as that of the training step; it may be traced (under `jit` NumPy is called back).
    """
    phi = config.phi
    if not phi.random:
        raise FastWeightError(f"features is {config.features!r}; expected 'favor-M': no other features are drawn")
    shape = phi.size, config.key_width

    def directions(dtype):
        if not isinstance(draw, jax.core.Tracer):
            return jnp.asarray(config.projection(int(draw)), dtype)
        numbers = lambda n: config.projection(int(n)).astype(dtype)  # noqa: E731
        return jax.pure_callback(numbers, jax.ShapeDtypeStruct(shape, dtype), draw, vmap_method="sequential")

    flat = traverse_util.flatten_dict(variables["constants"])
    for path, old in list(flat.items()):
        if path[-1] == "projection" and old.shape == shape:
            flat[path] = directions(old.dtype)
            flat[*path[:-1], "draws"] = jnp.asarray(draw, jnp.int32)
    return {**variables, "constants": traverse_util.unflatten_dict(flat)}
