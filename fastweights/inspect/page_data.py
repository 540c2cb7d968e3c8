"""The data of one model on the page: numbers of every token as small integers, and charts, in one compressed block.

Layout of the inflated block, which page_data.js takes apart in the browser:

    4 bytes     length of the header, little-endian
    header      JSON: all but the arrays, and for each array its type, its shape, and where it starts after the header
    arrays      each from a multiple of 4 on, since the browser's typed arrays look into the block without copying it
"""

import codecs
import gzip
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np

import fastweights
from fastweights.inspect.page_charts import charts
from fastweights.inspect.reading import Reading
from fastweights.inspect.sources import MemorySources
from fastweights.torch.probing import series
from fastweights.torch.probing.memory_records import MemoryRecord

STEPS_PER_BIT = 16  # of a loss in one byte, which reaches up to 15.9 bits
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of the losses that the page shows first
MOST_OVERWRITTEN = 20  # rows of the table


def model_block(reading: Reading, sources: dict[str, MemorySources]) -> bytes:
    """Everything that the page shows of one model, compressed.

    Args:
        reading: of the text, its probe closed.
        sources: of reads and writes, by the name of the memory; the page has none of other memories.
    """
    T, probe = len(reading.text.tokens), reading.probe
    text, lengths = pieces(reading)
    arrays: dict[str, np.ndarray] = dict(chars=np.minimum(lengths, 65535).astype(np.uint16))
    for mode in reading.modes:
        arrays[f"loss.{mode.key}"] = _bits(mode.losses)
    for back in reading.rolled_back:
        arrays[f"back.{back.token}"] = _bits(back.losses)
    names = series.short_names(probe.memories)
    memories: list[dict[str, Any]] = []
    followed = 0  # memories with sources, whose arrays are numbered in their order
    for record in probe.memories:
        memory: dict[str, Any] = dict(name=names[record.name], rule=record.rule, heads=record.beta.shape[-1])
        if record.name in sources:
            memory |= dict(followed=True, index=followed)
            arrays |= _memory_arrays(followed, record, sources[record.name], T)
            followed += 1
        memories.append(memory)
    header = dict(
        name=reading.name,
        file=reading.text.name,
        text=text,
        tokens=T,
        bytes=int(reading.widths.sum()),
        version=fastweights.__version__,
        every=probe.every,
        modes=[
            dict(key=mode.key, label=mode.label, about=mode.about, bits=_bits_per_byte(mode.losses, reading.widths))
            for mode in reading.modes
        ],
        back=[back.token for back in reading.rolled_back],
        quantiles=[float(q) for q in np.quantile(reading.modes[-1].losses / math.log(2), QUANTILES)],
        memories=memories,
        figures=charts(probe),
        overwritten=most_overwritten(sources),
    )
    return _pack(header, arrays)


def pieces(reading: Reading) -> tuple[str, np.ndarray]:
    """The text, and how many of its characters belong to each token (T,).

    A character belongs to the token that has its last byte: a token of a byte tokenizer may be a part of a character,
    and only the one that completes it has a character.
    """
    data, widths = reading.text.data, reading.widths
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    edges = [0, *np.cumsum(widths).tolist()]
    parts = [decode(data[start:end]) for start, end in pairwise(edges)]
    if parts:
        parts[-1] += decode(data[edges[-1] :], True)
    return "".join(parts), np.array([len(part) for part in parts], np.int64)


def most_overwritten(sources: dict[str, MemorySources]) -> list[dict[str, Any]]:
    """The tokens of whose values later writes took out the most, summed over memories; largest first."""
    if not sources:
        return []
    taken = np.sum([memory.taken for memory in sources.values()], 0)
    order = np.argsort(-taken)[:MOST_OVERWRITTEN]
    return [dict(token=int(t), taken=float(taken[t])) for t in order if taken[t] > 0]


def _memory_arrays(index: int, record: MemoryRecord, sources: MemorySources, T: int) -> dict[str, np.ndarray]:
    """Arrays of one memory, heads together: its sources, and what each token wrote.

    Shares, write rates, errors and cosines become one byte each, from 0 to 255, after they are mapped to 0 .. 1: write
    rates and errors, which are relative to the value, may reach 2; a cosine starts at -1.

    Args:
        index: number of the memory on the page; the names of its arrays end in it.
        record: what the probe measured, arrays (1, T * writes, H).
        sources: of the memory.
        T: tokens of the text.
    """

    def by_token(x: np.ndarray) -> np.ndarray:
        """Means (T,) over the heads, and over the writes of a token."""
        return x[0].mean(-1).reshape(T, -1).mean(-1)

    arrays: dict[str, np.ndarray] = {}
    for name, kind in (("reads", sources.reads), ("takes", sources.takes)):
        arrays[f"{name}.{index}"] = kind.distance
        arrays[f"{name}.share.{index}"] = _byte(kind.share)
        arrays[f"{name}.earlier.{index}"] = _byte(kind.earlier)
    value = np.maximum(by_token(record.value), 1e-30)
    arrays[f"beta.{index}"] = _byte(by_token(record.beta) / 2)
    arrays[f"error.{index}"] = _byte(by_token(record.error) / value / 2)
    arrays[f"cosine.{index}"] = _byte((by_token(record.cosine) + 1) / 2)
    return arrays


def _bits_per_byte(losses: np.ndarray, widths: np.ndarray) -> float:
    """Losses (T,) in nats of tokens of these widths (T,) in bytes, as bits per byte of the whole text."""
    return float(losses.sum() / math.log(2) / max(1, widths.sum()))


def _bits(losses: np.ndarray) -> np.ndarray:
    """Losses in nats as bytes, in sixteenths of a bit; more than 15.9 bits become 15.9."""
    return np.clip(np.round(losses / math.log(2) * STEPS_PER_BIT), 0, 255).astype(np.uint8)


def _byte(x: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1 as bytes from 0 to 255; what is outside is clipped, and what is not a number becomes 0."""
    return np.clip(np.round(np.nan_to_num(x) * 255), 0, 255).astype(np.uint8)


def _pack(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Header and arrays in the layout that is described at the top of this file, compressed."""
    places, body, start = {}, [], 0
    for name, x in arrays.items():
        data = np.ascontiguousarray(x).tobytes()
        data += bytes(-len(data) % 4)
        places[name] = dict(type=x.dtype.name, at=start, shape=list(x.shape))
        body.append(data)
        start += len(data)
    encoded = json.dumps(header | dict(arrays=places), allow_nan=False).encode()
    encoded += b" " * (-len(encoded) % 4)
    return gzip.compress(len(encoded).to_bytes(4, "little") + encoded + b"".join(body), 6, mtime=0)
