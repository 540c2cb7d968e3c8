"""Layers for PyTorch: batch first, state in and state out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastweights import attention, attention_config
from fastweights.attention import AttentionState
from fastweights.torch.framework import OPS


class FastWeightAttention(nn.Module):
    """A sequence mixer whose hidden state is a matrix per head, written and read token by token.

        >>> layer = FastWeightAttention(64, heads=4)
        >>> y, state = layer(torch.randn(2, 10, 64))         # (B, T, dim) -> (B, T, dim)
        >>> y, state = layer(torch.randn(2, 1, 64), state)   # go on where it stopped

    Args:
        dim: width of the input and output.
        heads: number of memories.
        features: map of queries and keys: "identity", "relu", "silu", "elu+1", "dpfp-NU" or "favor-M".
        rule: "delta" overwrites what a key retrieves; "sum" adds to it (linear attention).
        norm: "l2" or "sum" of the features, "none", "attention" (outputs are weighted means; also with the delta
            rule), "sum+attention", "hellinger" or "nlms" (docs/maths.md says what each is for).
        key_dim, value_dim: widths per head; dim / heads when absent.
        key_heads: heads of queries and keys, each shared by heads / key_heads memories; heads when absent.
        beta: learn a write rate per token and head; when absent, for the delta rule only.
        beta_max: the largest write rate, up to 2 (negative eigenvalues).
        decay: "learned" per token and head (Gated DeltaNet), "retnet", a share kept per token, one for each head, or
            None.
        conv: width of a causal convolution over q, k and v before the feature map; 0 for none.
        gate: multiply the output by SiLU of a projection of the input.
        out_norm: RMS norm over each head's output.
        seed: of FAVOR+'s random directions.
        redraw: in training, draw FAVOR+'s directions anew at each call; evaluation keeps the last ones.
        method, chunk_size: as for `fast_weight`.
    """

    in_proj: nn.Parameter
    projection: Tensor | None
    draws: Tensor

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        features: str = "silu",
        rule: str = "delta",
        norm: str = "l2",
        key_dim: int | None = None,
        value_dim: int | None = None,
        key_heads: int | None = None,
        beta: bool | None = None,
        beta_max: float = 1.0,
        decay: str | float | tuple[float, ...] | None = None,
        conv: int = 0,
        gate: bool = False,
        out_norm: bool = True,
        seed: int = 0,
        redraw: bool = False,
        method: str = "auto",
        chunk_size: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.config = attention_config.AttentionConfig(
            dim, heads, features=features, rule=rule, norm=norm, key_dim=key_dim, value_dim=value_dim,
            key_heads=key_heads, beta=beta, beta_max=beta_max, decay=decay, conv=conv, gate=gate, out_norm=out_norm,
            seed=seed,
        )  # fmt: skip
        self.redraw, self.method, self.chunk_size = redraw, method, chunk_size
        to = dict(device=device, dtype=dtype or torch.get_default_dtype())
        seed = int(torch.randint(2**62, ()))  # torch.manual_seed decides the initial weights
        for name, value in self.config.initial(np.random.default_rng(seed)).items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value, **to)))
        directions = self.config.projection()
        self.register_buffer("projection", None if directions is None else torch.tensor(directions, **to))
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=device))

    @classmethod
    def preset(cls, name: str, dim: int, heads: int, **changes: Any) -> "FastWeightAttention":
        """The layer of a published model: `FastWeightAttention.preset("delta-network", dim=256, heads=8)`."""
        return cls(dim, heads, **attention_config.preset_arguments(name, changes))

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """y (B, T, dim) and the state after x (B, T, dim).  cu_seqlens, mask: as for `fast_weight`."""
        if self.redraw and self.training and self.projection is not None:
            self.draw()
        parameters = dict(self.named_parameters(recurse=False), projection=self.projection)
        return attention.forward(
            self.config, OPS, parameters, x, state, cu_seqlens=cu_seqlens, mask=mask, method=self.method,
            chunk_size=self.chunk_size,
        )  # fmt: skip

    def step(self, x: Tensor, state: AttentionState | None = None) -> tuple[Tensor, AttentionState]:
        """One token: x (B, dim) -> y (B, dim) and the state."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def init_state(self, batch: int) -> AttentionState:
        """The state that None stands for."""
        c, like = self.config, self.in_proj
        wide = OPS.wide(like.new_zeros(batch, c.heads, c.feature_width, c.value_width))
        z = wide[..., 0].clone() if attention_config.NORMS[c.norm][1] else None
        conv = like.new_zeros(batch, c.conv - 1, c.channels) if c.conv else None
        return AttentionState(wide, z, conv)

    @torch.no_grad()
    def draw(self) -> None:
        """Draw FAVOR+'s directions anew; the n-th draw of a seed is always the same."""
        if self.projection is not None:
            self.draws += 1
            self.projection.copy_(torch.from_numpy(self.config.projection(int(self.draws))))

    def extra_repr(self) -> str:
        return f"{self.config.dim}, heads={self.config.heads}, {self.config.describe()}"


def export_parameters(module: nn.Module) -> dict[str, np.ndarray]:
    """Parameters by the name that they have in every framework, as NumPy; bfloat16 as float32.

        >>> {name: array.shape for name, array in export_parameters(FastWeightAttention(8, heads=2)).items()}
        {'in_proj': (8, 26), 'out_norm': (4,), 'out_proj': (8, 8)}

    They are the names of the state_dict. FAVOR+ adds "projection" and "draws".
    """
    weights = _weights(module).items()
    return {name: np.array((x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)) for name, x in weights}


@torch.no_grad()
def import_parameters(module: nn.Module, arrays: Mapping[str, Any]) -> None:
    """Set the parameters to `arrays`, which `export_parameters` of any framework gave for the same layer."""
    weights = _weights(module)
    attention_config.check_parameters(arrays, {name: x.shape for name, x in weights.items()})
    for name, x in weights.items():
        x.copy_(torch.from_numpy(np.array(arrays[name])))


def _weights(module):
    """The state_dict, without the count of draws where nothing is drawn."""
    state = module.state_dict()
    return {name: x for name, x in state.items()
            if not name.endswith("draws") or name.removesuffix("draws") + "projection" in state}  # fmt: skip
