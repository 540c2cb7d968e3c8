"""What a paper claims, as data: a sentence, its numbers with their source, and a judge that reads our results.

The file of an experiment lists its claims in CLAIMS. Whether an experiment succeeded, what `fastweights reproduce
--list` says and the scoreboard in docs/results all come from `judge`: nowhere is a verdict typed.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from fastweights.lab.engine.results import Row

Verdict = Literal["reproduced", "partly", "not", "opposite"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not", "opposite")
Judge = Callable[[list[Row]], tuple[Verdict, str]]  # from result rows to the verdict and our numbers as text
OURS = "ours"  # source of a statement that no paper makes: a control, or a finding of this project


@dataclass(frozen=True)
class Claim:
    """One sentence that results can support or contradict.

    Attributes:
        id: a name, unique within its experiment.
        says: the sentence.
        published: the paper's numbers, as text.
        source: the figure or table that these are from, or OURS.
        judge: from result rows to the verdict and our numbers as text.
        where: the rows that the claim is about, as {field: value, or tuple of values}; all rows when empty.
    """

    id: str
    says: str
    published: str
    source: str
    judge: Judge
    where: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Those of the rows that the claim is about."""
        values = {name: value if isinstance(value, tuple) else (value,) for name, value in self.where.items()}
        return [row for row in rows if all(row.get(name) in values[name] for name in values)]


@dataclass(frozen=True)
class Judgement:
    """What our results say about a claim.

    Attributes:
        claim: the claim.
        verdict: one of VERDICTS.
        ours: our numbers, as text.
        seeds: number of seeds in the rows that the claim is about.
        size: of the models and their training, as text.
    """

    claim: Claim
    verdict: Verdict
    ours: str
    seeds: int
    size: str

    def __str__(self) -> str:
        claim = self.claim
        published = "" if claim.source == OURS else f" [{claim.published}; {claim.source}]"
        return f"{claim.says} Ours: {self.ours}{published}"


def judge(module: ModuleType, rows: list[Row]) -> list[Judgement]:
    """Judgements of all claims of an experiment, in the order of its file.

    Args:
        module: of the experiment.
        rows: all its result rows; the judge of a claim sees the rows that the claim is about, and nothing else.
    """
    judgements = []
    for claim in module.CLAIMS:
        chosen = claim.rows(rows)
        verdict, ours = claim.judge(chosen)
        assert verdict in VERDICTS, verdict
        judgements.append(Judgement(claim, verdict, ours, count_seeds(chosen), module.size(chosen)))
    return judgements


def check(module: ModuleType, rows: list[Row], smoke: bool) -> tuple[list[str], list[str]]:
    """Check the results of an experiment against its claims, or those of a smoke run against `check_smoke`.

    Args:
        module: of the experiment.
        rows: all its result rows.
        smoke: whether they are of SMOKE settings, at which sizes the claims need not hold.

    Returns:
        Sentences that hold (claims that are reproduced), and sentences that do not.
    """
    if smoke:
        try:
            return module.check_smoke(rows), []
        except AssertionError as error:
            return [], [str(error)]
    confirmed: list[str] = []
    failed: list[str] = []
    for judgement in judge(module, rows):
        sentences = confirmed if judgement.verdict == "reproduced" else failed
        sentences.append(f"{judgement.verdict}: {judgement}")
    return confirmed, failed


def count_seeds(rows: list[Row]) -> int:
    """How many seeds the rows have: of arms, or of the copies of a model that an arm trains side by side."""
    copies = {(row["seed"], row["copy"]) for row in rows if "copy" in row}
    return len(copies or {row["seed"] for row in rows})


def all_hold(conditions: Iterable[bool]) -> Verdict:
    """The verdict "reproduced" when all conditions hold, "not" when none does, "partly" otherwise.

    Examples:
        >>> all_hold([True, False]), all_hold([False, False])
        ('partly', 'not')
    """
    results = list(conditions)
    if all(results):
        return "reproduced"
    return "partly" if any(results) else "not"


def all_less(pairs: Iterable[tuple[float, float]]) -> Verdict:
    """The verdict on the claim that the first number of each pair is less than the second.

    "opposite" when it is greater in all pairs; otherwise as `all_hold`. A number that is not finite counts as infinite.

    Examples:
        >>> all_less([(1.0, 2.0), (3.0, float("nan"))]), all_less([(2.0, 1.0)])
        ('reproduced', 'opposite')
    """
    numbers = [tuple(x if math.isfinite(x) else math.inf for x in pair) for pair in pairs]
    verdict = all_hold(a < b for a, b in numbers)
    return "opposite" if verdict == "not" and all(a > b for a, b in numbers) else verdict
