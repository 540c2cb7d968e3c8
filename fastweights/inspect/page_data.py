"""What the page holds about a model: numbers of every token as small integers, and charts, in one compressed block.

The browser inflates the block and looks into its arrays without copying them.
"""

import codecs
import gzip
import json
import math
from typing import Any

import numpy as np

import fastweights
from fastweights.inspect.page_charts import charts
from fastweights.inspect.reading import Reading
from fastweights.inspect.sources import Found
from fastweights.torch.probing import series

STEPS_PER_BIT = 16  # of a loss in a byte: up to 15.9 bits
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TOP = 20  # rows of the table of most overwritten tokens


def model_block(reading: Reading, found: dict[str, Found]) -> bytes:
    """Everything about one model, compressed: a JSON header and the arrays it names.

    Args:
        reading: losses of every way to read the text, and the closed probe.
        found: by the name of a memory, where its reads came from; memories that are not in it get no sources on the
            page.

    Returns:
        What `page` puts into a script element of the page; `_packed` says how it is laid out.
    """
    T, probe = len(reading.text.tokens), reading.probe
    text, lengths = pieces(reading)
    # Numbers of every token go into arrays of one or two bytes each; whatever is small or named goes into the header.
    arrays: dict[str, np.ndarray] = dict(chars=np.minimum(lengths, 65535).astype(np.uint16))
    for mode in reading.modes:
        arrays[f"loss.{mode.key}"] = _bits(mode.losses)
    for back in reading.rolled_back:
        arrays[f"back.{back.at}"] = _bits(back.losses)
    memories: list[dict[str, Any]] = []
    # One entry per memory; those whose sources were followed also get arrays, numbered in their order.
    names = series.short_names(probe.memories)
    for record in probe.memories:
        one: dict[str, Any] = dict(name=names[record.name], rule=record.rule, heads=record.beta.shape[-1])
        if record.name in found:
            i = len([m for m in memories if m.get("followed")])
            one |= dict(followed=True, index=i)
            arrays |= _of_memory(i, record, found[record.name], T)
        memories.append(one)
    about = dict(
        name=reading.name,
        file=reading.text.name,
        text=text,
        tokens=T,
        bytes=int(reading.widths.sum()),
        version=fastweights.__version__,
        every=probe.every,
        modes=[dict(key=m.key, label=m.label, about=m.about, bits=_per_byte(m.losses, reading)) for m in reading.modes],
        back=[b.at for b in reading.rolled_back],
        quantiles=[float(q) for q in np.quantile(reading.modes[-1].losses / math.log(2), QUANTILES)],
        memories=memories,
        figures=charts(probe),
        overwritten=most_overwritten(found),
    )
    return _packed(about, arrays)


def pieces(reading: Reading) -> tuple[str, np.ndarray]:
    """The text, and how many of its characters each token ends with; a character belongs to its last byte's token.

    A token of a byte tokenizer may be half a character; that token then has 0 characters, and the one that completes
    the character has it.
    """
    data, widths = reading.text.data, reading.widths
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    ends = np.cumsum(widths)
    parts = [decode(data[a:b]) for a, b in zip(np.r_[0, ends[:-1]].tolist(), ends.tolist(), strict=True)]
    if parts:
        parts[-1] += decode(data[int(ends[-1]) :], True)
    return "".join(parts), np.array([len(p) for p in parts], np.int64)


def most_overwritten(found: dict[str, Found]) -> list[dict[str, Any]]:
    """The tokens of whose values the most was taken out again by later writes, summed over memories."""
    if not found:
        return []
    taken = np.sum([f.taken for f in found.values()], 0)
    # Largest first; a token of which nothing was taken is no news, and is left out.
    order = np.argsort(-taken)[:TOP]
    return [dict(token=int(t), taken=float(taken[t])) for t in order if taken[t] > 0]


def _of_memory(i, record, found, T):
    """Arrays of one memory, heads together: sources, and what each token wrote.

    Shares, beta, errors and cosines become one byte each, 0 to 255, after being mapped to 0..1: beta and the error
    relative to the value may reach 2, a cosine starts at -1.

    Args:
        i: number of the memory on the page; names of arrays end in it.
        record: what the probe measured, tokens (1, T * writes, H).
        found: its `Found`.
        T: tokens of the text.
    """
    by_token = lambda x: x[0].mean(-1).reshape(T, -1).mean(-1)  # noqa: E731
    value = np.maximum(by_token(record.value), 1e-30)
    made: dict[str, np.ndarray] = {}
    for name, sources in (("reads", found.reads), ("takes", found.takes)):
        made |= {
            f"{name}.{i}": sources.back,
            f"{name}.share.{i}": _byte(sources.share),
            f"{name}.earlier.{i}": _byte(sources.earlier),
        }
    made[f"beta.{i}"] = _byte(by_token(record.beta) / 2)
    made[f"error.{i}"] = _byte(by_token(record.error) / value / 2)
    made[f"cosine.{i}"] = _byte((by_token(record.cosine) + 1) / 2)
    return made


def _per_byte(losses, reading):
    """Losses (T,) in nats as bits per byte of the whole text."""
    return float(losses.sum() / math.log(2) / max(1, reading.widths.sum()))


def _bits(losses):
    """Losses in nats as bytes, in sixteenths of a bit; more than 15.9 bits are shown as 15.9."""
    return np.clip(np.round(losses / math.log(2) * STEPS_PER_BIT), 0, 255).astype(np.uint8)


def _byte(x):
    """Numbers from 0 to 1 as bytes from 0 to 255; what is not a number becomes 0, and what is outside is cut."""
    return np.clip(np.round(np.nan_to_num(x) * 255), 0, 255).astype(np.uint8)


def _packed(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """[length of the header][header as JSON][arrays, each from a multiple of 4 on], compressed.

    The header's `arrays` say of each: its type, its shape, and where it starts after the header. The browser makes
    typed arrays that look into the inflated block without copying; those must start at a multiple of 4.
    """
    listed, body, at = {}, [], 0
    for name, x in arrays.items():
        data = np.ascontiguousarray(x).tobytes()
        data += bytes(-len(data) % 4)
        listed[name] = dict(type=x.dtype.name, at=at, shape=list(x.shape))
        body.append(data)
        at += len(data)
    header = json.dumps(about | dict(arrays=listed), allow_nan=False).encode()
    header += b" " * (-len(header) % 4)
    return gzip.compress(len(header).to_bytes(4, "little") + header + b"".join(body), 6, mtime=0)
