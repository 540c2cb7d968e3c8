"""One self-contained HTML page of what models did with a text: no file beside it, and nothing is fetched.

Numbers of every token are small integers in one compressed block per model (the browser inflates it), the charts are
Plotly's, and its script is part of the page. The text is data as well: nothing in it can become markup.
"""

import base64
import codecs
import gzip
import html
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import fastweights
from fastweights.files import write_text
from fastweights.inspect.readers import Reading
from fastweights.inspect.sources import Found
from fastweights.torch import probe_figures
from fastweights.torch.probe_figures import CURVES, LAYERS, MAPS

POINTS = 400  # of a curve, and columns of a map
STEPS_PER_BIT = 16  # of a loss in a byte: up to 15.9 bits
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TOP = 20  # rows of the table of most overwritten tokens

READ_MAPS = {
    "beta": "How strongly each token writes: 0 leaves the memory as it is, 1 replaces what the key retrieves.",
    "decay": "The share of the memory that each token keeps; below 1 everything stored fades.",
    "retrieved": "How much the key of each token finds in the memory before it writes.",
    "error": "How far the new value is from what its key retrieved: bright where the memory was wrong.",
    "cosine": "1 where a key retrieves the direction it is about to write, 0 where it retrieves something else.",
    "written": "How much each token changes the memory: the norm of its write.",
}
READ_CURVES = {
    "norms": "How much the memory holds. A curve that levels off has found a balance of writing and forgetting.",
    "ranks": "How many independent directions the memory uses; one association uses one.",
    "capacity": "The same as a share of all directions there are. Near 1 a new association must disturb old ones.",
    "interference": "How far what earlier keys retrieve moves while 16 more tokens are written: 0 kept, 1 gone.",
    "half-lives": "Tokens after which decay alone leaves half of a write; no line where nothing decays.",
    "losses": "Loss of the Fast Weight Layer as trained and as it learns from this text; the gap is what it learned.",
    "steps": "How far each step moves the weights of the Fast Weight Layer.",
}


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
    names = probe_figures.short_names(probe.memories)
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
        figures=_figures(probe),
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


def _figures(probe):
    """Plotly's figures as JSON, and the sentence beside each.

    Maps (a row per head, a column per token) where there are memories; curves of memories and of Fast Weight Layers
    where the model has them. All are thinned to POINTS columns, so the page stays small for a long text.
    """
    made: dict[str, list[dict[str, Any]]] = dict(maps=[], curves=[])
    if probe.memories:
        for kind, title in MAPS.items():
            figure = probe_figures.plotly_map(probe_figures.map_of(probe, kind, POINTS), title)
            made["maps"].append(_figure(kind, title, READ_MAPS[kind], figure))
    for kind in [*(CURVES if probe.memories else ()), *(LAYERS if probe.layers else ())]:
        title = CURVES[kind][1] if kind in CURVES else LAYERS[kind]
        figure = probe_figures.plotly_curves(probe_figures.curves(probe, kind, POINTS), title)
        made["curves"].append(_figure(kind, title, READ_CURVES[kind], figure))
    return made


def _figure(kind, title, about, figure):
    """One chart for the page: without a background of its own, so that it fits a light and a dark page."""
    figure.update_layout(template="none", paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", autosize=True)
    return dict(kind=kind, title=title, about=about, figure=json.loads(figure.to_json()))


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


def page(blocks: list[bytes], title: str) -> str:
    """The page of one model, or of several side by side.

    Args:
        blocks: one per model, as `model_block` makes them.
        title: heading of the page and of the browser's tab.

    Returns:
        HTML with style, script, Plotly and data inside: it can be mailed, and opens without a network.
    """
    from plotly.offline import get_plotlyjs

    here = files("fastweights.inspect")
    style, script, frame = ((here / name).read_text() for name in ("page.css", "page.js", "page.html"))
    encoded = lambda data: base64.b64encode(data).decode()  # noqa: E731
    data = [f'<script type="application/octet-stream" class="model">{encoded(b)}</script>' for b in blocks]
    plotly = encoded(gzip.compress(get_plotlyjs().encode(), 9, mtime=0))
    parts = dict(TITLE=html.escape(title), STYLE=style, SCRIPT=script, DATA="\n".join(data), PLOTLY=plotly)
    for name, part in parts.items():
        frame = frame.replace(f"<!--{name}-->", part)
    return frame


def write(path: Path, blocks: list[bytes], title: str) -> int:
    """Write the page; its size in bytes.

    Args:
        path: HTML file to write.
        blocks: what was read of each model, compressed.
        title: of the page.
    """
    content = page(blocks, title)
    write_text(path, content)
    return len(content.encode())
