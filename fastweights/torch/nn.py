"""Layers for PyTorch: batch first, state in and state out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from fastweights import attention
from fastweights.attention import AttentionState
from fastweights.attention.config import AttentionConfig
from fastweights.attention.presets import preset_arguments
from fastweights.literals import LayerNorm, Method, Rule
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.framework import OPS
from fastweights.torch.parameters import PROJECTIONS, from_bare_parameters


class FastWeightAttention(nn.Module):
    r"""A sequence mixer whose hidden state is a matrix per head, written and read token by token.

    It takes the place of self-attention in a block: the input is projected to queries, keys and values, every head
    keeps a memory S, and each token writes into it and reads from it,

    $$ S_t = a_t S_{t-1} + \beta_t \phi(k_t) (v_t - d\, (a_t S_{t-1})^\top \phi(k_t))^\top,
       \qquad o_t = S_t^\top \phi(q_t) $$

    with d = 1 for the delta rule and d = 0 for the sum. The outputs of all heads are normalised, gated where asked for,
    and projected back to `dim`. Time is linear in the number of tokens; the state does not grow with them.

        >>> layer = FastWeightAttention(64, heads=4)
        >>> y, state = layer(torch.randn(2, 10, 64))         # (B, T, dim) -> (B, T, dim)
        >>> y, state = layer(torch.randn(2, 1, 64), state)   # go on where it stopped
        >>> y.shape, state.memory.shape                      # (B, heads, key width, value width)
        (torch.Size([2, 1, 64]), torch.Size([2, 4, 16, 16]))

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
        device, dtype: of the parameters, as for any module of PyTorch.
    """

    in_proj: nn.Linear
    out_proj: nn.Linear
    projection: Tensor | None
    draws: Tensor

    carries_gradients = True  # whether the state after a call may have them, which compiled blocks ask

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
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
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
            decay=decay,
            decay_rank=decay_rank,
            erase=erase,
            conv=conv,
            gate=gate,
            out_norm=out_norm,
            seed=seed,
        )
        self.redraw, self.method, self.chunk_size = redraw, method, chunk_size
        to = dict(device=device, dtype=dtype or torch.get_default_dtype())
        if isinstance(features, nn.Module):
            self.feature_function = features  # so that its parameters are the layer's
        for name, shape in self.config.shapes.items():
            if name in PROJECTIONS:
                setattr(self, name, nn.Linear(shape[0], shape[1], bias=False, device=device, dtype=dtype))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **to)))
        directions = (self.config.phi.size, self.config.key_width) if self.config.phi.random else None
        self.register_buffer("projection", None if directions is None else torch.empty(directions, **to))
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=device))
        self.register_load_state_dict_pre_hook(from_bare_parameters)
        self._reset_own()

    def reset_parameters(self) -> None:
        """Draw the initial weights anew; FAVOR+'s directions are those of the seed.

        Projections and the convolution are uniform up to 1 / sqrt(in), as in `torch.nn.Linear`; a learned decay starts
        so that heads forget at different speeds.
        """
        for projection in (self.in_proj, self.out_proj):
            projection.reset_parameters()
        self._reset_own()

    @torch.no_grad()
    def _reset_own(self):
        """All but the projections, which have drawn theirs: uniform up to 1 / sqrt(in), as nn.Linear does."""
        c = self.config
        if c.conv:
            init.uniform_(self.get_parameter("conv"), -(c.conv**-0.5), c.conv**-0.5)
        for name in c.shapes:
            if name.startswith(("decay", "feedback", "removal")):
                x = getattr(self, name)
                x.copy_(c.initial_value(name, lambda a, b, _, x=x: torch.empty_like(x).uniform_(a, b), torch))
        if c.out_norm:
            init.ones_(self.get_parameter("out_norm"))
        self.draws.zero_()
        if self.projection is not None and not self.projection.is_meta:
            self.projection.copy_(torch.from_numpy(c.projection()))

    @classmethod
    def preset(cls, name: str, dim: int, heads: int, **changes: Any) -> "FastWeightAttention":
        """The layer of a published model, with `changes` to its arguments.

        Args:
            name: one of `PRESETS`, whose values are the arguments, or a shorter name of it.
            dim, heads: as for the class.
            changes: arguments that are to differ from the published ones.

        Examples:
            >>> FastWeightAttention.preset("delta-network", dim=32, heads=2, out_norm=True)
            FastWeightAttention(
              32, heads=2, features='dpfp-3', rule='delta', norm='sum'
              (in_proj): Linear(in_features=32, out_features=98, bias=False)
              (out_proj): Linear(in_features=32, out_features=32, bias=False)
            )
        """
        return cls(dim, heads, **preset_arguments(name, changes))

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """Read x and return what each token read from the memory, and the state after the last token.

        Outputs are those of reading token by token, however the call computes them, so a text may be cut anywhere: the
        state of one call is the start of the next.

        Args:
            x: (B, T, dim), or (1, T, dim) with `cu_seqlens`.
            state: what an earlier call returned; an empty memory when absent. It is not changed.
            cu_seqlens: (N + 1,) offsets of N texts packed into one row; each has its own state.
            mask: (B, T) bool, False for padding, which neither writes nor reads.

        Returns:
            y (B, T, dim) in the dtype of x, and an `AttentionState` of B texts (N where they are packed).

        Examples:
            >>> layer, x = FastWeightAttention(8, heads=2), torch.randn(1, 6, 8)
            >>> whole, _ = layer(x)
            >>> first, state = layer(x[:, :4])
            >>> rest, _ = layer(x[:, 4:], state)
            >>> torch.allclose(whole, torch.cat([first, rest], 1), atol=1e-5)
            True
        """
        if self.redraw and self.training and self.projection is not None:
            self.draw()
        return attention.forward(
            self.config,
            OPS,
            self,
            x,
            state,
            cu_seqlens=cu_seqlens,
            mask=mask,
            method=self.method,
            chunk_size=self.chunk_size,
        )

    def step(self, x: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState]:
        """One token: x (B, dim) -> y (B, dim) and the state, as generation needs it.

        Examples:
            >>> layer = FastWeightAttention(8, heads=2)
            >>> state = None
            >>> for x in torch.randn(3, 1, 8):  # three tokens of one text
            ...     y, state = layer.step(x, state)
            >>> y.shape
            torch.Size([1, 8])
        """
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def init_state(self, batch: int, *, device: Any = None, dtype: Any = None) -> AttentionState:
        """The empty state that None stands for, as tensors: for CUDA graphs and servers, which need it allocated first.

        Args:
            batch: number of texts, B.
            device, dtype: of the input that will come; those of the weights when absent. The memory is float32 or
                wider.

        Examples:
            >>> state = FastWeightAttention(8, heads=2, conv=4).init_state(3)
            >>> state.memory.shape, state.conv.shape, state.z
            (torch.Size([3, 2, 4, 4]), torch.Size([3, 3, 24]), None)
        """
        c, weight = self.config, next(self.parameters())
        device = weight.device if device is None else device
        dtype = weight.dtype if dtype is None else dtype
        memory = torch.zeros(
            batch, c.heads, c.feature_width, c.value_width, dtype=accumulation_dtype(dtype), device=device
        )
        z = memory[..., 0].clone() if c.attention_norm else None
        conv = torch.zeros(batch, c.conv - 1, c.channels, dtype=dtype, device=device) if c.conv else None
        return AttentionState(memory, z, conv)

    @torch.no_grad()
    def draw(self) -> None:
        """Draw FAVOR+'s directions anew; the n-th draw of a seed is always the same.

        The count of draws is saved with the weights, so that a resumed training goes on with the draw that comes next.
        A layer with other features has no directions, and nothing happens.
        """
        if self.projection is not None:
            self.draws += 1
            self.projection.copy_(torch.from_numpy(self.config.projection(int(self.draws))))

    def extra_repr(self) -> str:
        return f"{self.config.dim}, heads={self.config.heads}, {self.config.describe()}"
