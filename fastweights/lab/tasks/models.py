"""Models of the lab: the application's language model with any mixer in its blocks, and positions if wanted."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.attention.presets import preset_arguments
from fastweights.core import FastWeightError
from fastweights.models.config import Config
from fastweights.models.language_model import LanguageModel
from fastweights.models.mixers import FastWeightMixer, LSTMMixer, SoftmaxMixer
from fastweights.models.rotary import angles, rotate
from fastweights.torch.nn import FastWeightAttention

# Arguments of FastWeightAttention by preset: the papers' combinations of rule and features.
LAYERS: dict[str, dict[str, Any]] = {name: preset_arguments(name) for name in (
    "linear", "performer", "dpfp-sum", "retnet", "elu-delta", "performer-delta", "dpfp-delta", "delta", "gated-delta",
)}  # fmt: skip
SMALLER_FEATURES = {"favor-64": "favor-32", "dpfp-3": "dpfp-2"}  # which suit the lab's small heads
NAMES = ("softmax", "lstm", *LAYERS)


class MemoryMixer(FastWeightMixer):
    """The application's mixer around a FastWeightAttention with any arguments."""

    def __init__(self, layer: FastWeightAttention):
        nn.Module.__init__(self)
        self.layer = layer


class Attention(nn.Module):
    """Causal softmax attention over the whole sequence with rotary positions.

    Args:
        dim, heads: width and heads.
        conv: width of a causal convolution over q, k and v, such as the memories have; 0 for none.
    """

    def __init__(self, dim: int, heads: int, conv: int = 0):
        super().__init__()
        self.heads, self.width = heads, conv
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.conv = nn.Parameter(torch.empty(conv, 3 * dim).uniform_(-1, 1) / conv**0.5) if conv else None

    def forward(self, x: Tensor, state: Any = None, documents: Any = None, mask: Any = None) -> tuple[Tensor, None]:
        """y (B, T, D) for x (B, T, D), and no state: whatever the other arguments are, attention is over x alone."""
        B, T, D = x.shape
        y = self.in_proj(x)
        if self.conv is not None:
            padded, weight = F.pad(y, (0, 0, self.width - 1, 0)), self.conv.to(y.dtype)
            y = sum((weight[j] * padded[:, j : j + T] for j in range(1, self.width)), weight[0] * padded[:, :T])
        q, k, v = y.unflatten(-1, (3, self.heads, D // self.heads)).unbind(2)
        turns = angles(x, T, q.shape[-1] // 2)
        q, k = rotate(q, turns), rotate(k, turns)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(o.transpose(1, 2).reshape(B, T, D)), None

    def init_state(self, batch: int) -> None:
        """None: nothing is carried from segment to segment."""
        return None


class PositionedEmbedding(nn.Embedding):
    """Token embeddings plus sinusoids of the position in the segment."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings (B, T, D) of tokens (B, T); positions are counted from the start of the segment."""
        T, D = tokens.shape[1], self.embedding_dim
        rates = torch.exp(torch.arange(0, D, 2, device=tokens.device) * (-math.log(10_000.0) / D))
        angles = torch.arange(T, device=tokens.device)[:, None] * rates
        return super().forward(tokens) + torch.cat([angles.sin(), angles.cos()], -1) * D**-0.5


def mixer(
    name: str, dim: int, heads: int, *, conv: int = 0, window: int = 0, features: str = "", norm: str = ""
) -> nn.Module:
    """A mixer by name.

    Args:
        name: one of NAMES.
        dim, heads: width and heads.
        conv: width of a causal convolution before the memory; 0 for none.
        window: tokens that softmax carries from segment to segment, as Transformer-XL does; 0 for none.
        features, norm: in place of those of the preset; the preset's when empty.
    """
    if name == "softmax":
        return SoftmaxMixer(dim, heads, window) if window else Attention(dim, heads, conv)
    if name == "lstm":
        return LSTMMixer(dim)
    if name not in LAYERS:
        raise FastWeightError(f"model is {name!r}; expected one of {', '.join(NAMES)}")
    arguments = dict(LAYERS[name], conv=conv)
    arguments["features"] = features or SMALLER_FEATURES.get(arguments["features"], arguments["features"])
    if norm:
        arguments["norm"] = norm
    return MemoryMixer(FastWeightAttention(dim, heads, **arguments))


def build(
    names: list[str],
    vocab: int,
    *,
    dim: int,
    heads: int,
    conv: int = 0,
    window: int = 0,
    dropout: float = 0.0,
    positions: bool = False,
    head: str = "linear",
    fast_hidden: int = 0,
    refresh: int = 0,
    features: str = "",
    norm: str = "",
) -> LanguageModel:
    """The application's model with these mixers; all choices have about the same number of parameters.

    A mixer that has more parameters than softmax attention pays for them with a narrower feed-forward.

    Args:
        names: of the mixers, one per block.
        vocab: number of tokens.
        dim: width of the model.
        heads, conv, window, features, norm: of the mixers, as for `mixer`.
        dropout: in training.
        positions: whether sinusoids of the position are added to the embeddings.
        head: "linear", or "fwl" for a Fast Weight Layer.
        fast_hidden, refresh: hidden width of that layer, and tokens between its updates.
    """
    mixers = [mixer(n, dim, heads, conv=conv, window=window, features=features, norm=norm) for n in names]
    more_than_softmax = [sum(p.numel() for p in m.parameters()) - 4 * dim * dim for m in mixers]
    mean_more = max(0, sum(more_than_softmax) // len(mixers))
    hidden = (8 * dim * dim - mean_more) // (3 * dim) // 8 * 8
    config = Config(
        layers=f"lstm*{len(names)}",  # replaced below by mixers that the application's configuration has no words for
        dim=dim,
        heads=heads,
        hidden=hidden,
        head=head,
        dropout=dropout,
        fast_hidden=fast_hidden,
        refresh=refresh,
    )
    model = LanguageModel(config, vocab)
    for block, m in zip(model.blocks, mixers, strict=True):
        block.mixer = m
    if positions:
        embedding = PositionedEmbedding(vocab, dim)
        embedding.weight = model.embedding.weight
        model.embedding = embedding
    return model
