"""What callers of the ecosystem say about a batch, in our terms: padding, and where texts start inside a row."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.core import FastWeightError
from fastweights.models.documents import Documents

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # of packed batches
# They say nothing that the cache does not, or are for `generate` alone, which hands them on
IGNORED = ("cache_position", "token_type_ids", "is_first_iteration", "next_sequence_length", "tokenizer")


def packing_of(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords that a forward pass hands on; one that it does not know is an error."""
    unknown = [name for name, x in given.items() if name not in (*PACKING, *IGNORED) and x is not None]
    if unknown:
        raise FastWeightError(
            f"forward got {', '.join(unknown)}; expected no other keywords than its signature has, "
            f"{', '.join(PACKING)}: they would change nothing"
        )
    return {name: given[name] for name in PACKING if given.get(name) is not None}


def real_tokens(attention_mask: Tensor | None, tokens: int) -> Tensor | None:
    """(B, T) bool of the last `tokens`, or None where none of them is padding.

    A compiler does not know what a mask holds, so there it is always kept.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise FastWeightError(f"attention_mask has shape {tuple(attention_mask.shape)}; expected (B, T): 0 for padding")
    mask = attention_mask[:, -tokens:].bool()
    if mask.shape[1] != tokens:
        raise FastWeightError(f"attention_mask has {mask.shape[1]} columns; expected at least {tokens}: one per token")
    if torch.compiler.is_compiling() or mask.is_meta:
        return mask
    return None if bool(mask.all()) else mask


def text_starts(
    x: Tensor, mask: Tensor | None, position_ids: Tensor | None, packing: dict[str, Any]
) -> Documents | None:
    """Where texts start inside the rows of x (B, T, D), or None where no row holds more than one.

    Args:
        x: embeddings.
        mask: (B, T) bool, False for padding, or None.
        position_ids: (B, T); a text starts where they do not go on by 1. While compiling, what they hold is not known,
            and they are taken to go on.
        packing: cu_seq_lens_q (N + 1,) or seq_idx (B, T), as `packing_of` returns them; these come first.
    """
    B, T = x.shape[:2]
    offsets = packing.get("cu_seq_lens_q")
    if offsets is not None:
        return _by_offsets(offsets, x)
    if "seq_idx" in packing:
        changes = packing["seq_idx"].expand(B, T).diff(dim=1) != 0
    elif position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == T:
        changes = position_ids.expand(B, T).diff(dim=1) != 1
    else:
        return None
    if torch.compiler.is_compiling() or changes.is_meta:
        return None
    starts = F.pad(changes, (1, 0))
    if mask is not None:  # padding on a side of a text starts none
        starts = starts & mask & F.pad(mask[:, :-1], (1, 0))
    if not bool(starts.any()):
        return None
    if mask is not None:
        starts = starts | F.pad(mask.diff(dim=1), (1, 0))  # padding is a text of its own
    return Documents.of(starts.cpu().numpy(), x.device)


def _by_offsets(offsets, x):
    """Texts packed into one row with offsets (N + 1,), as documents of it."""
    B, T = x.shape[:2]
    if B != 1:
        raise FastWeightError(f"cu_seq_lens_q is given for {B} rows; expected one: all texts in it, end to end")
    offsets = offsets.to(x.device, torch.long)
    one = offsets.new_zeros(1)
    starts = (torch.arange(T, device=x.device) == offsets[:-1, None]).any(0) & (torch.arange(T, device=x.device) > 0)
    return Documents(starts[None], offsets, one, one + (len(offsets) - 2), torch.ones(1, device=x.device), False)
