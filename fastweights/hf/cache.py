"""What a model remembers, as the cache that `generate` passes around: its size does not grow with the text."""

import functools
from typing import Any, NamedTuple

from torch import Tensor

from fastweights.core import FastWeightError
from fastweights.models.language_model import State
from fastweights.torch.private import pytree
from fastweights.torch.tree import map_tensors, tensor_bytes


class Rows:
    """A state (B, ...) whose rows can be chosen and repeated; `copy.copy` is a fork that goes its own way."""

    is_compileable = False
    is_croppable = False

    def __init__(self, state: Any = None):
        self.state = state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on with what row beam_idx[i] knows."""
        self.state = map_tensors(lambda x: x.index_select(0, beam_idx.to(x.device)), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self.state = map_tensors(lambda x: x[indices.to(x.device)], self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row as many times, side by side: what beam search starts with."""
        self.state = map_tensors(lambda x: x.repeat_interleave(repeats, 0), self.state)

    def crop(self, tokens: int) -> None:
        """Only by nothing: what has been read cannot be unread."""
        if tokens:
            raise FastWeightError(
                f"crop({tokens}); expected no crop: a memory has no record of the past. Keep "
                "copy.copy of it from before the tokens that may go"
            )

    def reset(self) -> None:
        """Forget everything."""
        self.state = None

    @property
    def bytes(self) -> int:
        """The same after one token and after a million."""
        return tensor_bytes(self.state)

    @property
    def is_initialized(self) -> bool:
        """Whether anything has been read."""
        return self.state is not None


class Reading(NamedTuple):
    """One call, kept so that its last tokens can be unread: the state before it, and what was read.

    x (B, T, D): embeddings;  tokens (B, T) and features (B, T, D): of a model with a Fast Weight Layer.
    """

    state: State | None
    x: Tensor
    tokens: Tensor | None = None
    features: Tensor | None = None

    def first(self, n: int) -> "Reading":
        """The first n tokens of it."""
        tokens, features = (None if a is None else a[:, :n] for a in self[2:])
        return Reading(self.state, self.x[:, :n], tokens, features)


class FastWeightCache(Rows):
    """The state of a `FastWeightForCausalLM`, as the `past_key_values` that `generate` passes around.

    Its size is the same after one token and after a million. `copy.copy` is a fork that goes its own way.

    A memory cannot take back what it has read. Assisted generation, which proposes tokens and rejects some of them,
    therefore calls `activate_past_recording`: from then on the cache also keeps the state before each call and the
    tokens of the call. `crop` goes back to such a state, and the tokens that were accepted are read again.

    Attributes:
        state: of the blocks and of the Fast Weight Layer, or None before the first token.
        seen: tokens read, padding included.
        layers: what an attached head remembers beside it.

    Examples:
        >>> import torch
        >>> from fastweights.hf import FastWeightConfig, FastWeightForCausalLM
        >>> config = FastWeightConfig(hidden_size=16, num_attention_heads=2, mixers="delta")
        >>> model = FastWeightForCausalLM(config).eval()
        >>> cache = model(torch.zeros(1, 5, dtype=torch.long)).past_key_values
        >>> size = cache.bytes
        >>> cache = model(torch.zeros(1, 50, dtype=torch.long), past_key_values=cache).past_key_values
        >>> cache.seen, cache.bytes == size
        (55, True)
    """

    is_croppable = True

    def __init__(self, state: State | None = None, seen: int = 0, layers: tuple[Rows, ...] = ()):
        super().__init__(state)
        self.seen, self.layers = seen, list(layers)
        self.recording = False
        self.temporary = False  # whether `generate` made it, so that nobody else holds it
        self.readings: list[Reading] = []
        self.again: Reading | None = None  # tokens that the next call reads before its own

    def activate_past_recording(self) -> None:
        """From now on, until the next `crop`, calls can be undone."""
        self.recording = True

    def crop(self, tokens: int) -> None:
        """Go back: a negative number takes back that many tokens, a positive one keeps that many from the start."""
        left = -tokens if tokens <= 0 else max(0, self.seen - tokens)
        if left and self.layers:
            raise FastWeightError(f"crop({tokens}) with an attached head; expected no crop: it keeps no record")
        self.seen -= left
        if self.again is not None and left:
            kept = max(0, self.again.x.shape[1] - left)
            left -= self.again.x.shape[1] - kept
            self.again = self.again.first(kept) if kept else None
        # Calls are undone from the last one on; what stays of the one that is cut will be read again.
        while left and self.readings:
            last = self.readings.pop()
            kept = max(0, last.x.shape[1] - left)
            left -= last.x.shape[1] - kept
            self.state, self.again = last.state, last.first(kept) if kept else None
        if left:
            raise FastWeightError(
                f"crop({tokens}) goes {left} tokens further back than was recorded; expected "
                "activate_past_recording() before they were read, or copy.copy of the cache from "
                "before them: a memory itself keeps no record of the past"
            )
        self.readings = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that were read, which `generate` counts from."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1  # none

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on with what row beam_idx[i] knows, an attached head's part too."""
        super().reorder_cache(beam_idx)
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order, an attached head's part too."""
        super().batch_select_indices(indices)
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row as many times, side by side, an attached head's part too."""
        super().batch_repeat_interleave(repeats)
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen, self.layers, self.readings, self.again = 0, [], [], None

    @property
    def batch_size(self) -> int:
        """Rows of the state; -1 before the first token."""
        found: list[int] = []
        map_tensors(lambda x: found.append(len(x)), self.state)
        return found[0] if found else -1

    def __copy__(self) -> "FastWeightCache":
        return FastWeightCache(self.state, self.seen, tuple(type(x)(x.state) for x in self.layers))

    def __repr__(self) -> str:
        return f"FastWeightCache(seen={self.seen}, bytes={self.bytes if self.is_initialized else 0})"


def _leaves(cache: FastWeightCache) -> tuple[list, Any]:
    """What `torch.export` and `torch.compile` see: tensors, beside which the rest is fixed."""
    return [cache.state], cache.seen


def _of_leaves(values: Any, seen: Any) -> FastWeightCache:
    """The cache that `_leaves` took apart."""
    return FastWeightCache(next(iter(values)), seen)


pytree.register_pytree_node(
    FastWeightCache,
    _leaves,
    _of_leaves,
    serialized_type_name="fastweights.hf.FastWeightCache",
    flatten_with_keys_fn=lambda cache: ([(pytree.GetAttrKey("state"), cache.state)], cache.seen),
)


class HeadMemory(Rows):
    """What an attached head remembers, as one more layer of any model's cache.

    It holds no keys and values and no tokens, so it answers the questions that caches ask their layers with nothing.
    """

    supports_early_init = False
    is_sliding = False
    keys = values = None

    def get_seq_length(self) -> int:
        """0: it holds no keys of tokens, so it adds nothing to the length of the text."""
        return 0

    def get_max_length(self) -> int:
        """-1: it has room for a text of any length."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As many columns as there are new tokens: nothing before them is attended to."""
        return query_length, 0

    def offload(self) -> None:
        """Stays where it is: it is small."""

    def prefetch(self) -> None:
        """Is where it was."""


def memory_of(cache: Any) -> HeadMemory:
    """The head's part of a cache, which gets one when it has none."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        return _beside(cache)
    found = next((x for x in layers if isinstance(x, HeadMemory)), None)
    if found is None:
        found = HeadMemory()
        if layers:  # where every layer of the model is sliding, none may seem to attend to all tokens
            found.is_sliding = all(getattr(layer, "is_sliding", False) for layer in layers)
        layers.append(found)
    return found


def _beside(cache: Any) -> HeadMemory:
    """In an old cache, which has no layers: an attribute of it, whose rows follow when its own are reordered."""
    if not hasattr(cache, "head_memory"):
        kind: Any = type(cache)
        try:
            cache.head_memory = HeadMemory()
            if hasattr(cache, "reorder_cache"):
                cache.__class__ = _reordering(kind)
        except (AttributeError, TypeError):
            raise FastWeightError(
                f"the model's cache is a {type(cache).__name__}; expected one that the head can "
                "keep what it learned in: call with use_cache=False"
            ) from None
    return cache.head_memory


@functools.cache
def _reordering(kind: Any) -> type:
    """A class like `kind` whose reordering also reorders the head's memory; one per class, made once."""

    class WithHeadMemory(kind):
        def reorder_cache(self, beam_idx: Tensor) -> Any:
            self.head_memory.reorder_cache(beam_idx)
            return super().reorder_cache(beam_idx)

    return WithHeadMemory
