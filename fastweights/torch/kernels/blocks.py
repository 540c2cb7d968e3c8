"""Block sizes by shape, dtype and GPU: `python -m benchmarks.choose_blocks` measures these tables.

Nothing is tuned at run time. The tables are those of Hopper (an H200); other GPUs use the same numbers without TMA (the
tensor memory accelerator, which copies tiles), as do inputs that it cannot take.
"""

from functools import cache

import torch
import triton

# Walks: (values, warps, stages) by the width of a block of keys and whether there are more programs of 64 values than
# multiprocessors, for 16-bit numbers by the TMA unit.
WALK = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 3), (128, False): (64, 4, 3)}
REVERSE = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 3), (128, False): (64, 4, 3)}
# With decay they just fit the shared memory, but for Triton 3.4, or where queries read before their token: one vector
# more.
_DEEP = (128, 8, 3) if tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 5) else (64, 4, 3)
_AFTER = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): _DEEP, (128, False): (64, 4, 3)}
WITH_DECAY = {False: _AFTER, True: _AFTER | {(128, True): (64, 4, 3)}}
# (keys, warps, stages), by the width of a block of values and whether the rule is delta; 128 by the TMA unit.
PAST = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 3), (128, False): (128, 8, 3)}
FUTURE = {(64, True): (64, 4, 2), (64, False): (64, 4, 3), (128, True): (128, 8, 2), (128, False): (128, 8, 3)}
# Gradients within rows, by whether numbers are float32: (keys, values, warps, stages) of `_pairs` and of `_keys`, which
# is faster with small blocks: what they leave of the shared memory is the cache that loads go through.
PAIRS = {False: (128, 128, 4, 1), True: (64, 64, 4, 1)}
KEYS = {False: (64, 64, 4, 1), True: (64, 64, 4, 1)}
# (warps, stages), by the width of a block of keys.
INVERSE = {64: (4, 1), 128: (4, 1)}
# The same for general memories, whose chunks are larger.
GENERAL_WALK = {(64, True): (64, 4, 3), (64, False): (64, 4, 3), (128, True): (128, 8, 2), (128, False): (64, 4, 2)}
# Their other kernels, by whether numbers are float32: (keys, warps, stages) and (keys, values, warps, stages).
GENERAL_PREPARE = {False: (64, 4, 2), True: (64, 4, 1)}
GENERAL_GRADIENTS = {False: (64, 64, 4, 1), True: (64, 64, 4, 1)}

# No operand of a product on Hopper's tensor cores may have rows shorter than 128 bytes: of those of 64, the ptxas of
# CUDA 12.8, which comes with Triton 3.6, computes addresses from registers that nothing has written
# (docs/results/kernels-on-a-gpu.md).
NARROWEST = 64  # 16-bit numbers
SPAN = 16  # rows
ON_CHIP = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}  # widest keys whose memory fits registers


def wide(k):
    """BK of the walks in wide_keys.py, or None where the memory fits registers."""
    return None if k.shape[-1] <= ON_CHIP[k.dtype] else 64 if k.dtype == torch.float32 else 128


def every(K, V, dtype, inputs, spec):
    """Rows in a span, after which the memory is kept: 1 where gradients of q and k are made row by row.

    Those of decay need the memory before and after every row. Half precision has too little range to divide by beta,
    and registers too little room for wide values. Otherwise 16: a sixteenth of the memory traffic and of the memory
    kept.
    """
    by_row = inputs.log_decay is not None or inputs.erase is not None or ON_CHIP[dtype] < K or V > 128
    by_row |= inputs.beta is not None and (not spec.delta or dtype == torch.float16)
    return 1 if by_row else SPAN


def saves_errors(K, dtype, beta, spec):
    """Whether the walk saves the errors u. The backward pass computes them again where keys are wide, and for float16
    with rates, by which it could not divide.
    """
    return spec.delta and ON_CHIP[dtype] >= K and not (beta is not None and dtype == torch.float16)


def block(width):
    """The smallest power of two that holds keys of `width`, at least 64: see `NARROWEST`."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def walks(layout, k, V, table):
    """(TMA, BK, BV, warps, stages) of a walk. More than four warps only where the memory does not fit one group."""
    BK, BV = block(k.shape[-1]), max(16, min(64, 1 << (V - 1).bit_length()))
    if k.dtype == torch.float32:
        return False, BK, BV, 8 if BK > 64 else 4, 1
    if BK > 128:
        return False, BK, BV, 8, 1
    if uses_tma(layout, k, BK, V, 64):
        many = layout.sequences * k.shape[2] * -(-V // 64) > _multiprocessors(k.device)
        BV, warps, stages = table[BK, many]
        return (True, BK, BV, warps, stages) if V % BV == 0 else (True, BK, 64, 4, stages)
    return False, BK, BV, 4, 2


def spans(layout, k, V, delta, table):
    """(TMA, BV, BK, warps, stages) of the walks over spans."""
    BV = block(V)
    BK, warps, stages = table[BV, delta]
    if k.dtype == torch.float32:
        return False, BV, 64, 8 if BV > 64 else 4, 1
    if BV == 64:
        return False, BV, BK, warps, stages
    if k.shape[-1] % BK == 0 and uses_tma(layout, k, k.shape[-1], V, BV):
        return True, BV, BK, warps, stages
    return False, BV, 64, 4, 1 if delta else 2


def uses_tma(layout, q, BK, V, BV):
    """Whether tiles are loaded and stored by Hopper's TMA unit: whole chunks, whole blocks, 16-bit numbers."""
    fits = layout.whole and q.shape[-1] == BK and V % BV == 0 and q.dtype != torch.float32
    return fits and q.is_cuda and _is_hopper(q.device)


def local(q, V):
    """(BK, BV, warps, stages) of `_pairs` and of `_keys`, the gradients within a row."""
    return tuple(
        (BK, min(BV, block(V)), *rest) for BK, BV, *rest in (x[q.dtype == torch.float32] for x in (PAIRS, KEYS))
    )


def inverse(k):
    """(BK, options of the launch) of the inverses."""
    exact = k.dtype == torch.float32
    BK = 128 if k.shape[-1] > 64 and not exact else 64  # float32: half as much to compile
    warps, stages = INVERSE[BK]
    options = dict(num_warps=warps, num_stages=stages)
    if not exact and k.shape[-1] <= BK:
        options["maxnreg"] = 128  # of registers so few that four programs share a multiprocessor
    return BK, options


def general_prepare(k):
    """(BK, warps, stages) of what general.py prepares."""
    return GENERAL_PREPARE[k.dtype == torch.float32]


def general_gradients(k, V):
    """(BK, BV, warps, stages) of its gradients."""
    BK, BV, warps, stages = GENERAL_GRADIENTS[k.dtype == torch.float32]
    return BK, min(BV, block(V)), warps, stages


@cache
def _is_hopper(device):
    """Whether the device is of the generation that the tables were measured on."""
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def _multiprocessors(device):
    """Programs that the device runs at once, at one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
