"""Write rates and decays of a call with one decay per head, or none, laid out chunk by chunk for the kernels.

The walks have no time to add up logarithms or to compute exponentials: each chunk waits for the one before. So one
kernel does it for all chunks first, and writes beta, the running sums of log_decay, and the decays themselves.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fastweights.torch.kernels.layout import C, find_chunk
from fastweights.torch.kernels.plan import Slot
from fastweights.torch.kernels.tiles import decay, divisor


@triton.jit
def _rates(beta, log_decay, chunk_beta, log_g, factors, sequence_table, chunk_table, T, chunks_per_sequence, tokens,
           H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr,
           BEFORE: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """beta and log_decay of one chunk, turned from (tokens, H) to (H, C), the latter as `Decays` describes.

    One program: one chunk and BH heads, which lie side by side in the inputs. Sums are made in float64. Past the end of
    a sequence beta is 1e-15 and log_decay 0: nothing is written, and the memory is kept as it is.

        beta, log_decay  (tokens, H), or None
        chunk_beta       (chunks, H, C), written: beta, where a rate of 0 has become 1e-15, so that it can be divided by
        log_g            (chunks, H, C), written;  factors (chunks, H, 3, C), written: see `Decays`
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    i = tl.arange(0, C)
    token, remaining = find_chunk(chunk_table, T, chunks_per_sequence, chunk, C, PACKED)
    real = (i < remaining)[:, None] & (head < H)[None, :]
    source = (token + i)[:, None] * H + head[None, :]
    target = (chunk * H + head)[None, :] * C + i[:, None]
    if BETA:
        b = tl.load(beta + source, mask=real, other=0.0).to(tl.float32)
        b = divisor(b)
        tl.store(chunk_beta + target, b, mask=(head < H)[None, :])
    if DECAY:
        a = tl.load(log_decay + source, mask=real, other=0.0).to(tl.float32)
        sums = tl.cumsum(a.to(tl.float64), 0)
        tl.store(log_g + target, sums.to(log_g.dtype.element_ty), mask=(head < H)[None, :])
        target_3 = (chunk * H + head)[None, :] * 3 * C + i[:, None]  # of factors, which has three rows of C
        tl.store(factors + target_3, decay(sums), mask=(head < H)[None, :])
        tl.store(factors + target_3 + C, decay(sums - a if BEFORE else sums), mask=(head < H)[None, :])
        end = tl.sum(a.to(tl.float64), 0)
        tl.store(factors + target_3 + 2 * C, decay(end[None, :] - sums), mask=(head < H)[None, :])


class Decays(NamedTuple):
    """Slots of the decays of all chunks, one decay per head.

    Attributes:
        log_g: (chunks, H, C), the sum of log_decay from the chunk's start to each token. For float32 inputs it is
            float64: the difference of two close sums would otherwise keep too few digits.
        factors: (chunks, H, 3, C), three decays for each token: from the chunk's start to the token (g), from there to
            what the token's query reads (r), and from the token to the chunk's end (g_end / g).
    """

    log_g: Slot
    factors: Slot


def shapes_of_rates(chunks, H, has_beta, dtype, has_decay=True):
    """[(shape, dtype)] of the tensors that `plan_rates` makes for keys of `dtype`: beta, then `Decays`, if present."""
    sums = torch.float64 if dtype == torch.float32 else torch.float32
    shapes = [((chunks, H, C), torch.float32)] if has_beta else []
    return [*shapes, ((chunks, H, C), sums), ((chunks, H, 3, C), torch.float32)] if has_decay else shapes


def plan_rates(plan, beta, log_decay, layout, spec, k):
    """Plan the rates by chunks: (slot of beta (chunks, H, C), `Decays`); None for either of them that is absent.

    Args:
        plan: the plan to add the launch to.
        beta, log_decay: slots (B, T, H), or None.
        layout: where chunks are.
        spec: says whether queries read before their token's write.
        k: slot of the keys, whose dtype decides the dtype of the sums.
    """
    H = k.shape[2]
    if beta is None and log_decay is None:
        return None, None
    shapes = shapes_of_rates(layout.max_chunks, H, beta is not None, k.dtype, log_decay is not None)
    slots = [plan.empty(shape, dtype) for shape, dtype in shapes]
    chunk_beta = None if beta is None else slots.pop(0)
    decays = None if log_decay is None else Decays(*slots)
    if layout.chunks:
        BH = min(16, 1 << (H - 1).bit_length())
        layout.launch(
            plan, _rates, (layout.chunks, -(-H // BH)), (beta, log_decay, chunk_beta, *(decays or (None, None))),
            (H, C, BH, spec.before, beta is not None, log_decay is not None, layout.is_packed))  # fmt: skip
    return chunk_beta, decays
