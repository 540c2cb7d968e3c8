"""The scoreboard: every claim of every experiment beside our results, computed from the CSVs and never typed."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fastweights.lab import EXPERIMENTS
from fastweights.lab.engine.claims import OURS, VERDICTS, Judgement, judge
from fastweights.lab.engine.experiment import about, docstring, load
from fastweights.lab.engine.results import key, read_csv

CHECKOUT = Path(__file__).parents[3] / "docs" / "results"  # there where the package lies in a checkout of the project
PAGE = "README.md"  # of a folder of results
MEANING = dict(
    reproduced="our numbers say the same",
    partly="they do for some of the models, sizes or corpora that were tried",
    **{"not": "they do not show it"},
    opposite="they say the contrary everywhere",
)


@dataclass(frozen=True)
class Entry:
    """One experiment: its claims judged, or the reason why they are not.

    Attributes:
        name, title, paper: of the experiment, from its file.
        judged: a judgement per claim.
        reason: why there are none, such as results that are missing.
    """

    name: str
    title: str
    paper: str
    judged: list[Judgement]
    reason: str = ""


def folder_of_results(out: Path | None) -> Path:
    """The folder that was named, docs/results here, or that of the checkout which this package lies in."""
    here = Path("docs/results")
    return out or (here if here.is_dir() or not CHECKOUT.is_dir() else CHECKOUT)


def entry(name: str, folder: Path) -> Entry:
    """An experiment judged on FOLDER/NAME.csv, if it holds results of all arms of the full settings.

    Otherwise the entry says what is missing: a part of the results could make a claim look better than it is.
    """
    module, text, path = load(name), docstring(name), folder / f"{name}.csv"
    head = name, text.splitlines()[0], about(text, "Paper")
    if not path.exists():
        return Entry(*head, [], f"no results: {path} does not exist; `fastweights reproduce {name}` makes it")
    # Only results of the full settings count, and only when none is missing.
    done, arms = read_csv(path), module.arms(**module.FULL)
    missing = sum(key(arm) not in done for arm in arms)
    if missing:
        return Entry(*head, [], f"{missing} of {len(arms)} arms have no results in {path}; the rest is not judged")
    return Entry(*head, judge(module, [row for arm in arms for row in done[key(arm)]]))


def entries(folder: Path) -> list[Entry]:
    """All experiments, judged on the results in a folder."""
    return [entry(name, folder) for name in EXPERIMENTS]


def counts(found: list[Entry]) -> str:
    """`20 reproduced, 9 partly, 1 not, 5 opposite` of the papers' claims; statements of our own are not counted."""
    count = Counter(j.verdict for e in found for j in e.judged if j.claim.source != OURS)
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS)


def _count_line(e: Entry) -> str:
    """A row of the table of counts: how many of the papers' claims have each verdict."""
    count = Counter(j.verdict for j in e.judged if j.claim.source != OURS)
    return f"| [{e.name}](#{e.name}) | " + " | ".join(str(count[verdict] or "") for verdict in VERDICTS) + " |"


def _pages(folder: Path) -> list[str]:
    """The other pages of the folder by their titles: what was measured besides the papers' claims comes first."""
    titles = {
        p.name: p.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for p in sorted(folder.glob("*.md"))
    }
    titles.pop(PAGE, None)
    experiments = [f"{name}.md" for name in EXPERIMENTS if f"{name}.md" in titles]
    order = [*(name for name in titles if name not in experiments), *experiments]
    return ["Pages:", "", *(f"- [{titles[name]}]({name})" for name in order), ""] if order else []


def page(folder: Path) -> str:
    """The scoreboard as a page of Markdown, the first of a folder of results.

    Counts, the other pages of the folder, how to run an experiment again, then a table of claims for each.
    """
    found = entries(folder)
    total = sum(j.claim.source != OURS for e in found for j in e.judged)
    lines = [
        "# Results",
        "",
        "<!-- Made by `fastweights reproduce --scoreboard` from the CSV files in this folder. -->",
        "",
        f"What the papers claim, and what this code found. Of {total} claims: {counts(found)}.",
        "",
        "The verdicts are computed from the CSV files beside this page:",
        "",
        *(f"- **{verdict}**: {MEANING[verdict]};" for verdict in VERDICTS[:-1]),
        f"- **{VERDICTS[-1]}**: {MEANING[VERDICTS[-1]]}.",
        "",
        "Our models are far smaller than the papers', so a verdict is about the claim at our size. Ours are means over",
        "seeds, with the lowest and highest seed in brackets; with one seed or two, a small difference says little.",
        'Statements whose published number is "ours" are in no paper and are not counted.',
        "",
        f"| experiment | {' | '.join(VERDICTS)} |",
        "|---|" + "---|" * len(VERDICTS),
        *(_count_line(e) for e in found),
        "",
        *_pages(folder),
        "To run one again: `fastweights reproduce NAME --data FOLDER`. Nothing is downloaded; FOLDER holds the corpora",
        "that the experiment reads, of `wikitext-2/wiki.{train,valid,test}.tokens`, `enwik8` (or `enwik8.xz`),",
        "`babi/en/qa*.txt` and `multi30k/{train,val,test_2016_flickr}.{en,de}`; with `--smoke` none is needed.",
        "",
    ]
    # A section per experiment, a row per claim.
    for e in found:
        picture = f" ([figure]({e.name}.png), [CSV]({e.name}.csv))" if not e.reason else ""
        more = f" [What was found]({e.name}.md)." if (folder / f"{e.name}.md").exists() else ""
        lines += [f"## {e.name}", "", f"{e.title} `fastweights reproduce {e.name}`{picture}. {e.paper}{more}", ""]
        if e.reason:
            lines += [f"Not judged: {e.reason}.", ""]
            continue
        lines += ["| claim | verdict | ours | published | seeds | our size |", "|---|---|---|---|---|---|"]
        for j in e.judged:
            published = OURS if j.claim.source == OURS else f"{j.claim.published} ({j.claim.source})"
            cells = j.claim.says, f"**{j.verdict}**", j.ours, published, str(j.seeds), j.size
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
