"""What a paper claims, as data: a sentence, its numbers with their source, and a judge that reads our results.

A paper's file lists its claims in CLAIMS; whether an experiment succeeded, what `fastweights reproduce --list` says and
the scoreboard in docs/results all come from `judge`, and nowhere is a verdict typed.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from fastweights.lab.engine.results import Row

Verdict = Literal["reproduced", "partly", "not", "opposite"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not", "opposite")
Judge = Callable[[list[Row]], tuple[Verdict, str]]  # rows -> verdict, our numbers as text
OURS = "ours"  # source of a statement that no paper makes: a control, or a finding of this project


@dataclass(frozen=True)
class Claim:
    """One sentence that results can support or contradict.

    Attributes:
        id: short, unique within its experiment.
        says: the sentence.
        published: the paper's numbers, as text.
        source: where they are from, or OURS.
        judge: result rows -> the verdict and our numbers, as text.
        where: fields (one value, or several) of the rows that the claim is about; seeds and size are counted on these.
    """

    id: str
    says: str
    published: str
    source: str
    judge: Judge
    where: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Those that the claim is about."""
        wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in self.where.items()}
        return [row for row in rows if all(row.get(name) in values for name, values in wanted.items())]


@dataclass(frozen=True)
class Judgement:
    """What our results say about a claim.

    Attributes:
        claim: the sentence.
        verdict: "reproduced", "partly", "not" or "opposite".
        ours: our numbers, as text.
        seeds: how many the numbers are means of.
        size: how large the experiment was.
    """

    claim: Claim
    verdict: Verdict
    ours: str
    seeds: int
    size: str

    def __str__(self) -> str:
        claim = self.claim
        beside = "" if claim.source == OURS else f" [{claim.published}; {claim.source}]"
        return f"{claim.says} Ours: {self.ours}{beside}"


def judge(module: ModuleType, rows: list[Row]) -> list[Judgement]:
    """The claims of an experiment on all its result rows, in the order of its file.

    Each judge sees the rows that its claim is about, and nothing else.
    """
    judged = []
    for claim in module.CLAIMS:
        chosen = claim.rows(rows)
        verdict, ours = claim.judge(chosen)
        assert verdict in VERDICTS, verdict
        judged.append(Judgement(claim, verdict, ours, seeds(chosen), module.size(chosen)))
    return judged


def check(module: ModuleType, rows: list[Row], smoke: bool) -> tuple[list[str], list[str]]:
    """(what holds, what does not) as sentences: the claims, or with SMOKE settings whatever such a run can show.

    Args:
        module: of the experiment, with its CLAIMS.
        rows: of its CSV.
        smoke: whether they are of a run at tiny sizes.
    """
    if smoke:
        try:
            return module.check_smoke(rows), []
        except AssertionError as error:
            return [], [str(error)]
    judged = judge(module, rows)
    whole, rest = (["reproduced"], ["partly", "not", "opposite"])
    confirmed, failed = ([f"{j.verdict}: {j}" for j in judged if j.verdict in some] for some in (whole, rest))
    return confirmed, failed


def seeds(rows: list[Row]) -> int:
    """How many seeds the rows have: of arms, or of copies of a model that an arm trains side by side."""
    copies = {(row["seed"], row["copy"]) for row in rows if "copy" in row}
    return len(copies or {row["seed"] for row in rows})


def held(conditions: Iterable[bool]) -> Verdict:
    """reproduced when all hold, not when none does, else partly.

    Examples:
        >>> held([True, False]), held([False, False])
        ('partly', 'not')
    """
    found = list(conditions)
    return "reproduced" if all(found) else "partly" if any(found) else "not"


def less(pairs: Iterable[tuple[float, float]]) -> Verdict:
    """The claim is that the first of each pair is less than the second: opposite when it is so nowhere.

    A number that is not finite counts as infinitely large.

        >>> less([(1.0, 2.0), (3.0, float("nan"))]), less([(2.0, 1.0)])
        ('reproduced', 'opposite')
    """
    finite = [tuple(x if math.isfinite(x) else math.inf for x in pair) for pair in pairs]
    verdict = held(a < b for a, b in finite)
    return "opposite" if verdict == "not" and all(a > b for a, b in finite) else verdict


def spread(mean_low_high: tuple[float, float, float], form: str = ".3g", unit: float = 1.0) -> str:
    """A mean with the lowest and highest seed, or the mean alone where they are the same.

    Args:
        mean_low_high: over seeds.
        form: how a number is written.
        unit: what numbers are multiplied with, such as 100 for percent.

    Examples:
        >>> spread((22.93, 5.49, 40.4)), spread((0.5, 0.5, 0.5))
        ('22.9 (5.49 to 40.4)', '0.5')
    """
    mean, low, high = (format(unit * x, form) for x in mean_low_high)
    return mean if low == high else f"{mean} ({low} to {high})"
