"""How large the tiles of each kernel are, by shape, dtype and GPU, and what the forward pass keeps in memory.

Nothing is tuned at run time: a first call compiles kernels and measures nothing. The tables were measured on Hopper (an
H200) by `python -m benchmarks.choose_blocks`; other GPUs use the same numbers without TMA (the tensor memory
accelerator, which copies tiles), as do inputs that it cannot take.

Entries of a table end in (warps, stages): warps of a program, and loads that run ahead of a loop. What comes before
them is the width of a tile in value features (BV), key features (BK), or both, as each comment says.
"""

from functools import cache

import torch
import triton

# Walks, for 16-bit numbers by the TMA unit: (BV, warps, stages) by (BK, whether there are more programs of 64 values
# than the GPU has multiprocessors).
WALK = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 3), (128, False): (64, 4, 3)}
REVERSE = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 3), (128, False): (64, 4, 3)}
# Walks with decay, by whether queries read before their token's write. Eight warps just fit the shared memory, but not
# with Triton 3.4, nor where queries read before, which takes one vector more.
_EIGHT_WARPS = (128, 8, 3) if tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 5) else (64, 4, 3)
_READ_AFTER = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): _EIGHT_WARPS, (128, False): (64, 4, 3)}
WITH_DECAY = {False: _READ_AFTER, True: _READ_AFTER | {(128, True): (64, 4, 3)}}
# spans.py: (BK, warps, stages) by (BV, whether the rule is delta); where BV is 128, by the TMA unit.
PAST = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 3), (128, False): (128, 8, 3)}
FUTURE = {(64, True): (64, 4, 2), (64, False): (64, 4, 3), (128, True): (128, 8, 2), (128, False): (128, 8, 3)}
# local.py: (BK, BV, warps, stages) of `_pair_gradients` and of `_key_gradients`, by whether numbers are float32. The
# second is faster with small tiles: loads go through the rest of the shared memory, which serves as their cache.
PAIRS = {False: (128, 128, 4, 1), True: (64, 64, 4, 1)}
KEYS = {False: (64, 64, 4, 1), True: (64, 64, 4, 1)}
# inverse.py: (warps, stages) by BK.
INVERSE = {64: (4, 1), 128: (4, 1)}
# general_walks.py: as WALK. A chunk there has more tiles.
GENERAL_WALK = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 2), (128, False): (64, 4, 2)}
# general.py and general_gradients.py, by whether numbers are float32: (BK, warps, stages), (BK, BV, warps, stages).
GENERAL_PREPARE = {False: (64, 4, 2), True: (64, 4, 1)}
GENERAL_GRADIENTS = {False: (64, 64, 4, 1), True: (64, 64, 4, 1)}

# No operand of a product on Hopper's tensor cores may have rows shorter than 128 bytes: of those of 64, the ptxas of
# CUDA 12.8, which comes with Triton 3.6, computes addresses from registers that nothing has written
# (docs/results/kernels-on-a-gpu.md).
NARROWEST = 64  # numbers of 16 bits in a row of an operand
SPAN = 16  # chunks from one saved memory to the next, where spans are possible
ON_CHIP = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}  # widest keys whose memory fits registers


def wide_keys_block(k):
    """BK of the walks of wide_keys.py for keys k (a slot), or None where the memory fits registers."""
    return None if k.shape[-1] <= ON_CHIP[k.dtype] else 64 if k.dtype == torch.float32 else 128


def chunks_per_span(K, V, dtype, inputs, spec):
    """How many chunks lie between two places at which the memory is saved: SPAN, or 1.

    It is 1 where all other gradients are made chunk by chunk (local.py, general_gradients.py), from the memory before
    each chunk and its gradient after it. Gradients of a decay and of an erase key need that. So do all calls that
    spans.py cannot take: wide keys and values, which it holds in registers, and write rates of the sum rule or in
    float16, which has too little range to divide by them. Spans take a sixteenth of the memory traffic, and of the
    memory that is saved.

    Args:
        K, V: widths of features and values.
        dtype: of the inputs.
        inputs, spec: of the call.
    """
    by_chunk = inputs.log_decay is not None or inputs.erase is not None or ON_CHIP[dtype] < K or V > 128
    by_chunk |= inputs.beta is not None and (not spec.delta or dtype == torch.float16)
    return 1 if by_chunk else SPAN


def saves_errors(K, dtype, beta, spec):
    """Whether the forward walk saves the errors u of a call with one decay per head, or none.

    The backward pass computes them again where keys are wide, for the sum rule, and for float16 with write rates: with
    saved errors, which hold their rate as a factor, it would divide by beta.
    """
    return spec.delta and ON_CHIP[dtype] >= K and not (beta is not None and dtype == torch.float16)


def padded_width(width):
    """The smallest power of two that is at least `width` and at least `NARROWEST`: a tile's width for such keys."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def walk_options(layout, k, V, table):
    """(TMA, BK, BV, warps, stages) of a walk over keys k (a slot) and values of width V.

    table: WALK, REVERSE, an entry of WITH_DECAY, or GENERAL_WALK. Elsewhere than there a program has more than four
    warps only where its part of the memory does not fit the registers of four.
    """
    BK, BV = padded_width(k.shape[-1]), max(16, min(64, 1 << (V - 1).bit_length()))
    if k.dtype == torch.float32:
        return False, BK, BV, 8 if BK > 64 else 4, 1
    if BK > 128:
        return False, BK, BV, 8, 1
    if uses_tma(layout, k, BK, V, 64):
        fills_gpu = layout.sequences * k.shape[2] * -(-V // 64) > _multiprocessors(k.device)
        BV, warps, stages = table[BK, fills_gpu]
        return (True, BK, BV, warps, stages) if V % BV == 0 else (True, BK, 64, 4, stages)
    return False, BK, BV, 4, 2


def span_options(layout, k, V, delta, table):
    """(TMA, BV, BK, warps, stages) of the walks over spans.  table: PAST or FUTURE;  delta: whether the rule is."""
    BV = padded_width(V)
    BK, warps, stages = table[BV, delta]
    if k.dtype == torch.float32:
        return False, BV, 64, 8 if BV > 64 else 4, 1
    if BV == 64:
        return False, BV, BK, warps, stages
    if k.shape[-1] % BK == 0 and uses_tma(layout, k, k.shape[-1], V, BV):
        return True, BV, BK, warps, stages
    return False, BV, 64, 4, 1 if delta else 2


def uses_tma(layout, q, BK, V, BV):
    """Whether tiles [C, BK] of keys and [C, BV] of values are loaded and stored by Hopper's TMA unit.

    It takes 16-bit numbers, and neither chunks nor tiles that are cut short.
    """
    fits = layout.full_chunks and q.shape[-1] == BK and V % BV == 0 and q.dtype != torch.float32
    return fits and q.is_cuda and _is_hopper(q.device)


def local_options(q, V):
    """(BK, BV, warps, stages) of the two kernels of local.py, one after the other."""
    is_float32 = q.dtype == torch.float32
    return tuple((BK, min(BV, padded_width(V)), *rest) for BK, BV, *rest in (PAIRS[is_float32], KEYS[is_float32]))


def inverse_options(k):
    """(BK, options of the launch) of inverse.py."""
    is_float32 = k.dtype == torch.float32
    BK = 128 if k.shape[-1] > 64 and not is_float32 else 64  # of float32, 64 is half as much to compile
    warps, stages = INVERSE[BK]
    options = dict(num_warps=warps, num_stages=stages)
    if not is_float32 and k.shape[-1] <= BK:
        options["maxnreg"] = 128  # so few registers per thread that four programs share a multiprocessor
    return BK, options


def general_prepare_options(k):
    """(BK, warps, stages) of the kernels of general.py."""
    return GENERAL_PREPARE[k.dtype == torch.float32]


def general_gradient_options(k, V):
    """(BK, BV, warps, stages) of the kernels of general_gradients.py."""
    BK, BV, warps, stages = GENERAL_GRADIENTS[k.dtype == torch.float32]
    return BK, min(BV, padded_width(V)), warps, stages


@cache
def _is_hopper(device):
    """Whether the device is of the generation that the tables were measured on."""
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def _multiprocessors(device):
    """How many multiprocessors the device has: programs that run at once, at one for each."""
    return torch.cuda.get_device_properties(device).multi_processor_count
