"""What `fastweights bench hf` found: times of every part, with and without us, as a table and as JSON."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console

from fastweights.bench.hf_models import Size
from fastweights.bench.report import new_table


class Times(NamedTuple):
    """Milliseconds of transformers' own and of ours, medians, and the median of their ratios, turn by turn."""

    theirs: float
    ours: float
    ratio: float


class Result(NamedTuple):
    """What was timed of a family, at a size and a part of PARTS.  decode: None where nothing is generated."""

    family: str
    size: str
    part: str
    forward: Times
    both: Times
    decode: Times | None


def show(
    results: Sequence[Result],
    left_out: dict[str, str],
    sizes: dict[str, Size],
    device: str,
    dtype: torch.dtype,
    console: Console,
) -> None:
    """Tables of what `run` returned: milliseconds or tokens per second, transformers' own, ours, and how many times.

    Args:
        results, left_out: what `run` returned.
        sizes, device, dtype: what it was given.
        console: of rich, to print on.
    """
    kind = str(dtype).removeprefix("torch.")
    for name, size in sizes.items():
        table = new_table(
            f"{name}: width {size.hidden}, {size.heads} heads of {size.width}, {size.tokens} tokens; "
            f"{kind} on {device}; transformers / ours"
        )
        for heading in ("family", "part", "forward, ms", "", "forward+backward, ms", "", "decode, tokens/s", ""):
            table.add_column(heading, justify="left" if heading in ("family", "part") else "right")
        for r in results:
            if r.size == name:
                cells = [c for t in (r.forward, r.both) for c in (f"{t.theirs:.3g} / {t.ours:.3g}", f"{t.ratio:.2f}x")]
                if r.decode is not None:
                    speeds = (1e3 * size.new / x for x in r.decode[:2])
                    cells += [" / ".join(f"{x:.3g}" for x in speeds), f"{r.decode.ratio:.2f}x"]
                table.add_row(r.family, r.part, *cells)
        console.print(table)
    for why in left_out.values():
        console.print(f"Left out: {why}", markup=False, highlight=False)


def payload(results: Sequence[Result], left_out: dict[str, str], sizes: dict[str, Size], dtype: torch.dtype) -> dict:
    """What goes to the JSON file.

    Returns:
        Milliseconds of both sides and their ratio, by family, size and part.
    """
    timed = [r._asdict() | {n: t and t._asdict() for n, t in zip(r._fields[3:], r[3:], strict=True)} for r in results]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "left_out": left_out,
        "sizes": {n: s._asdict() for n, s in sizes.items()},
        "milliseconds": timed,
    }
