"""What all kernels of the memory are written with: loads and stores of tiles, products, and decay.

Letters and switches mean the same in every kernel. After its tensors a kernel of the memory takes:

    sequence_table, chunk_table    tables of a packed batch (layout.py), None for a plain one
    T, chunks_per_sequence         tokens and chunks of each sequence of a plain batch
    tokens                         of all sequences: the first axis of tensors (tokens, H, width)
    H, K, V, C                     heads, key width, value width, tokens of a chunk
    BK, BV                         key and value features of a tile: powers of two, which may be wider than what is left
    DELTA, BEFORE                  the delta rule; whether queries read the memory before their own token's write
    BETA, DECAY, PACKED            whether there are write rates, decays, packed sequences
    OUT, SAVE                      whether outputs are wanted; chunks of a span at whose start the memory is saved, or 0
    PRECISION                      how products of float32 numbers are made: exact, or one pass of TF32
    STAGES, TMA                    how many loads run ahead; whether the tensor memory accelerator makes them

Inside of a kernel:

    i                              number of a token in its chunk, 0 to C - 1
    chunk, head, chunk_head        number of a chunk, of a head, and chunk * H + head, by which (chunks, H, ...) is read
    token                          first token of the chunk, by its number among all tokens
    remaining                      tokens of the sequence from `token` on: token i of the chunk is real if i < remaining
    first_k, first_v               first key feature and first value feature of a tile
    x_i                            the tile of a tensor x that belongs to the chunk
    g, r                           decay from the chunk's start to a token, and to what the token's query reads
    log_g, log_r, log_end          their logarithms, and that of the decay of the whole chunk

[a, b] is the shape of a tile that a program holds, (a, b) that of a tensor in the GPU's memory. Sums are kept in
float32; what enters a product is rounded to the dtype of the inputs, and `x_low` is the rounded x.
"""

from functools import cache

import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions


@triton.jit
def describe(x, tokens, WIDTH: tl.constexpr, C: tl.constexpr, B: tl.constexpr, TMA: tl.constexpr):
    """What loads and stores of tiles [C, B] of x (tokens, WIDTH) are given: a TMA descriptor, or the pointer itself."""
    if TMA:
        return tl.make_tensor_descriptor(x, [tokens, WIDTH], [WIDTH, 1], [C, B])
    else:
        return x


INTERPRETED = type(describe).__name__ == "InterpretedFunction"  # Triton's interpreter, which runs kernels on a CPU


@triton.jit
def load_tile(x, token, head, column, remaining,
              H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
              TMA: tl.constexpr = False):  # fmt: skip
    """x[token : token + C, head, column : column + B] as a tile [C, B], zero past the sequence and past the width D.

    Args:
        x: pointer to (tokens, H, D), or its descriptor with TMA.
        token, head, column: the tile's first token, its head, and its first feature.
        remaining: tokens of the sequence from `token` on.
    """
    if TMA:
        return x.load([token.to(tl.int32), (head * D + column).to(tl.int32)])
    else:
        i = tl.arange(0, C)
        feature = column + tl.arange(0, B)
        mask = (i < remaining)[:, None] & (feature < D)[None, :]
        return tl.load(x + ((token + i) * H + head)[:, None] * D + feature[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(x, value, token, head, column, remaining,
               H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
               TMA: tl.constexpr = False):  # fmt: skip
    """Store the tile `value` [C, B], in the dtype of x, where `load_tile` with the same arguments would load it from.

    Nothing is stored past the sequence or past the width D.
    """
    if TMA:
        x.store([token.to(tl.int32), (head * D + column).to(tl.int32)], value.to(x.dtype))
    else:
        i = tl.arange(0, C)
        feature = column + tl.arange(0, B)
        mask = (i < remaining)[:, None] & (feature < D)[None, :]
        offsets = ((token + i) * H + head)[:, None] * D + feature[None, :]
        tl.store(x + offsets, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_block(x, matrix, row, column, K: tl.constexpr, V: tl.constexpr,
               BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr = False):  # fmt: skip
    """x[matrix, row : row + BK, column : column + BV] as a tile [BK, BV], zero outside.

    x: pointer to matrices (..., K, V), or its descriptor with TMA;  matrix: the number of the matrix.
    """
    if TMA:
        return x.load([(matrix * K + row).to(tl.int32), column])
    else:
        d = row + tl.arange(0, BK)
        e = column + tl.arange(0, BV)
        mask = (d < K)[:, None] & (e < V)[None, :]
        return tl.load(x + matrix * K * V + d[:, None] * V + e[None, :], mask=mask, other=0.0)


@triton.jit
def store_block(x, value, matrix, row, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                wanted=None):  # fmt: skip
    """Store the tile `value` [BK, BV], in the dtype of x, where `load_block` would load it from.

    wanted: a condition; nothing is stored where it is false. None: always.
    """
    d = row + tl.arange(0, BK)
    e = column + tl.arange(0, BV)
    mask = (d < K)[:, None] & (e < V)[None, :]
    if wanted is not None:
        mask &= wanted
    tl.store(x + matrix * K * V + d[:, None] * V + e[None, :], value.to(x.dtype.element_ty), mask=mask)


@cache
def exact_products():
    """The PRECISION of the most exact products of float32 that tensor cores make.

    That is six products of bfloat16 numbers where Triton has them, else three of TF32.
    """
    known = not INTERPRETED and "bf16x6" in CUDAOptions.allowed_dot_input_precisions
    return "bf16x6" if known else "tf32x3"


@triton.jit
def product(a, b, c, PRECISION: tl.constexpr):
    """a @ b + c in float32; c None: a @ b.

    For TF32, float32 factors are rounded to nearest here, since tensor cores cut off the bits that do not fit. Float32
    sums are added to c outside of the tensor cores, which truncate what they add to.
    """
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a, b = round_to_tf32(a), round_to_tf32(b)
    if a.dtype == tl.float32 and c is not None:
        return c + tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def solve(a, b, PRECISION: tl.constexpr):
    """a @ b, where one of them is the inverse of a chunk's triangular system.

    In TF32, too, it is made in three passes: its errors go on from chunk to chunk.
    """
    return product(a, b, None, "tf32x3" if PRECISION == "tf32" else PRECISION)


@triton.jit
def round_to_tf32(x):
    """x rounded to the ten bits of TF32, to nearest: 4096 is half of the last bit that is kept."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def decay(log):
    """exp(log) in float32: the decay of which `log` is the logarithm, or the difference of two.

    As a power of two: of tl.exp each costs three instructions more, for results below 1e-38.
    """
    return tl.exp2(log.to(tl.float32) * 1.4426950408889634)


@triton.jit
def read_decay(log_g, i, BEFORE: tl.constexpr):
    """log_r of tokens i: the logarithm of the decay of what their queries read, from log_g (C,) of their chunk.

    With BEFORE a query reads what the token before it left, so that log_r of the first token is 0.
    """
    if BEFORE:
        return tl.load(log_g + i - 1, mask=i > 0, other=0.0)
    else:
        return tl.load(log_g + i)


@triton.jit
def divisor(b):
    """Write rates b, with 1e-15 in the place of 0: that writes next to nothing, and can be divided by, twice."""
    return tl.where(tl.abs(b) < 1e-15, 1e-15, b)
