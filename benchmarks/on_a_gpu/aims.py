"""What the numbers of jobs should be: a row for each aim, made of the JSON that jobs write."""

import csv
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.table import Table

Numbers = Any  # JSON of a job
Values = dict[str, float]  # by what they are of, such as a shape
MATRIX = 787e12  # FLOP per second, against which the aims of training were set
PAPER = 63_000  # words per second of the small model in its paper


class Aim(NamedTuple):
    """What a number should be.

    Attributes:
        job: that measures it.
        what: it is.
        of: from the job's JSON to values; a KeyError where a job wrote only a part.
        most, least: what holds; neither where there is no aim.
    """

    job: str
    what: str
    of: Callable[[Numbers], Values]
    most: float | None = None
    least: float | None = None

    @property
    def said(self) -> str:
        """The aim in words."""
        if self.most is None and self.least is None:
            return ""
        return f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}"

    def holds(self, value: float) -> str:
        """yes, no, or nothing where there is no aim."""
        if not self.said:
            return ""
        return "yes" if (value <= self.most if self.most is not None else value >= self.least) else "NO"  # type: ignore[operator]


def by_shape(numbers: Numbers) -> dict[str, dict[str, Any]]:
    """Results of `bench memory` by shape and decay."""
    found: dict[str, dict[str, Any]] = {}
    for result in numbers["results"]:
        found.setdefault(",".join(map(str, result["shape"])), {})[result["decay"]] = result
    return found


def decay(more: str, less: str, which: str) -> Callable[[Numbers], Values]:
    """How many times as long a call takes with one kind of decay as with another, by shape."""
    ms = lambda result: result[which]["kernel"]["median"]  # noqa: E731
    return lambda numbers: {shape: ms(r[more]) / ms(r[less]) for shape, r in by_shape(numbers).items()}


def beside_fla(which: str) -> Callable[[Numbers], Values]:
    """How many times as long FLA takes, by shape, where it ran."""
    return lambda numbers: {
        ",".join(map(str, r["shape"])): r[which]["FLA"]["median"] / r[which]["kernel"]["median"]
        for r in numbers["results"]
        if "FLA" in r[which]
    }


def first_calls(dtype: str) -> Callable[[Numbers], Values]:
    """Seconds of the first calls in a dtype."""
    return lambda numbers: {kind: s for kind, s in numbers["seconds"].items() if kind.endswith(dtype)}


def rows_of(numbers: Numbers) -> list[dict[str, Any]]:
    """Rows of `bench train`."""
    return numbers["train"]["results"]


def share(numbers: Numbers) -> Values:
    """Share of MATRIX that captured steps reach, by model."""
    rows = [r for r in rows_of(numbers) if r["how"] == "captured"]
    return {r["model"]: r["tokens_per_second"] * r["flop_per_token"] / MATRIX for r in rows}


def words(numbers: Numbers) -> Values:
    """Tokens per second of captured steps, by model."""
    return {r["model"]: r["tokens_per_second"] for r in rows_of(numbers) if r["how"] == "captured"}


def layer_of_fla(numbers: Numbers) -> Values:
    """Tokens per second of ours over those of FLA's layer in the same model, by how ours ran."""
    (theirs,) = (r["tokens_per_second"] for r in rows_of(numbers) if r["model"].startswith("FLA"))
    return {r["how"]: r["tokens_per_second"] / theirs for r in rows_of(numbers) if not r["model"].startswith("FLA")}


def our_loop(numbers: Numbers) -> Values:
    """Tokens per second of `generate` of transformers by our loop, over its own, by number of texts."""
    rate = {(r["batch"], r["how"]): r["tokens_per_second"] for r in numbers["decode"]["results"]}
    ours, theirs = "transformers, our loop", "transformers, its loop"
    return {f"{batch} texts": x / rate[batch, theirs] for (batch, how), x in rate.items() if how == ours}


def block(framework: str, refresh: int | None) -> Callable[[Numbers], Values]:
    """Milliseconds of a framework's block over those of the published one, by shape."""
    return lambda numbers: {
        ",".join(map(str, r["shape"])): r["timings"][framework]["median"] / r["published_ms"]
        for r in numbers["fwl_frameworks"]
        if r["refresh"] == refresh and r["published_ms"]
    }


def of_static(*modes: str) -> Callable[[Numbers], Values]:
    """Time of reading in some modes, over that of static windows."""
    return lambda numbers: {mode: numbers["modes"][mode]["of_static"] for mode in modes}


def gains(*arms: str) -> Callable[[Numbers], Values]:
    """What ways to learn gain, over what dynamic evaluation of all weights gains (RMS), on the pages that it read."""

    def found(numbers: Numbers) -> Values:
        summary = min(numbers["tables"].items(), key=lambda item: int(item[0]))[1]["summary.csv"]
        gain = {row["arm"]: float(row["gain_over_memory"]) for row in csv.DictReader(summary.splitlines())}
        return {arm: gain[arm] / gain["dynamic-all-rms"] for arm in arms}

    return found


AIMS = (
    Aim("kernels", "checks that hold, of all", lambda n: {f"{n['held']} of {n['of']}": n["held"] / n["of"]}, least=1),
    Aim("kernels", "largest error, of what is allowed", lambda n: {"": n["worst"]}, most=1),
    Aim("decay", "one per head / none, with backward", decay("head", "none", "forward_backward"), most=1.2),
    Aim("decay", "one per channel / per head, with backward", decay("channel", "head", "forward_backward"), most=1.4),
    Aim("decay", "one per head / none, forward", decay("head", "none", "forward")),
    Aim("decay", "one per channel / per head, forward", decay("channel", "head", "forward")),
    Aim("first-calls", "seconds", first_calls("bfloat16"), most=5),
    Aim("first-calls", "seconds", first_calls("float32"), most=10),
    *(
        Aim(f"{name}-{width}", f"FLA's {function} / ours, {said}", beside_fla(which), least=1)
        for name, function in (("kda", "chunk_kda"), ("gla", "chunk_gla"))
        for width in (128, 64)
        for which, said in (("forward", "forward"), ("forward_backward", "with backward"))
    ),
    Aim("train-8x512", "share of 787 TFLOP/s, captured", share, least=0.3),
    Aim("train-12x768", "share of 787 TFLOP/s, captured", share, least=0.35),
    Aim("train-12x768-4096", "share of 787 TFLOP/s, captured", share),
    Aim("train-paper", "words/s, captured", words, least=PAPER),
    Aim("train-fla", "tokens/s, of FLA's layer", layer_of_fla, least=1),
    Aim("train-fwl", "ms of a step, of no layer", lambda n: {k: x for k, x in n["ratio"].items() if k != "no layer"}),
    Aim("losses", "what ways differ by, of what seeds do", lambda n: {"": n["ways"] / n["seeds"]}, most=1),
    Aim("decode", "tokens/s of generate by our loop, of its own", our_loop, least=1),
    *(
        Aim(f"fwl-{name}", f"ms, of the published block's: {form}", block(name, refresh), most=most)
        for name in ("jax", "keras")
        for form, refresh, most in (("published form", None, 1), ("refresh 64", 64, None))
    ),
    *(
        aim
        for window in (512, 2048)
        for aim in (
            Aim(f"pretrained-{window}", "time, of static windows", of_static("body+cache"), most=1.3),
            Aim(f"pretrained-{window}", "time, of static windows", of_static("cache", "both", "dynamic")),
        )
    ),
    *(
        aim
        for body in ("softmax", "lstm")
        for aim in (
            Aim(f"learning-{body}", "gain, of dynamic evaluation's", gains("refresh-16-trained-at-64"), least=0.95),
            Aim(f"learning-{body}", "gain, of dynamic evaluation's", gains("refresh-64-trained"), least=0.9),
            Aim(f"learning-{body}", "gain, of dynamic evaluation's", gains("cache-refresh-64-trained"), least=1),
        )
    ),
)  # fmt: skip


def judged(found: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """(job, what, aim, got, whether it holds), a row for each value; found: results by job, those without numbers too.

    A job that has no numbers has no rows; where the numbers lack something, the row says what.
    """
    rows = []
    for aim in AIMS:
        numbers = found.get(aim.job, {}).get("numbers")
        if numbers is None:
            continue
        try:
            values, lacking = aim.of(numbers), "nothing of the kind was measured"
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
            values, lacking = {}, f"not in its numbers: {type(error).__name__} {error}"
        if not values:
            rows.append((aim.job, aim.what, aim.said, lacking, ""))
        for name, value in values.items():
            got = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            rows.append((aim.job, f"{aim.what}: {name}" if name else aim.what, aim.said, got, aim.holds(value)))
    return rows


def table(found: dict[str, dict[str, Any]]) -> Table:
    """What `judged` returns, to print, and below it the jobs with an aim that have not been measured."""
    absent = [job for job in dict.fromkeys(aim.job for aim in AIMS) if found.get(job, {}).get("numbers") is None]
    shown = Table(title="what was aimed at", title_justify="left", caption_justify="left")
    shown.caption = f"not measured: {', '.join(absent)}" if absent else None
    for heading in ("job", "what", "aim", "got", "holds"):
        shown.add_column(heading, justify="right" if heading == "got" else "left")
    for row in judged(found):
        shown.add_row(*row)
    return shown
