"""The scoreboard: every claim of every experiment beside our results, computed from the CSV files and never typed."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fastweights.lab import EXPERIMENTS
from fastweights.lab.engine.claims import OURS, VERDICTS, Judgement, judge
from fastweights.lab.engine.experiment import docstring, load, section
from fastweights.lab.engine.results import arm_key, read_csv

CHECKOUT = Path(__file__).parents[3] / "docs" / "results"  # exists where the package lies in a checkout of the project
PAGE = "README.md"  # file of the scoreboard in a folder of results
MEANING = {
    "reproduced": "our numbers say the same",
    "partly": "they do for some of the models, sizes or corpora that were tried",
    "not": "they do not show it",
    "opposite": "they say the contrary everywhere",
}


@dataclass(frozen=True)
class Entry:
    """One experiment: its claims judged, or the reason why they are not.

    Attributes:
        name: of the experiment.
        title: first line of its docstring.
        paper: the docstring's section Paper.
        judged: a judgement of each claim; empty where there is a reason.
        reason: why the claims are not judged, such as results that are missing; empty where they are.
    """

    name: str
    title: str
    paper: str
    judged: list[Judgement]
    reason: str = ""


def folder_of_results(out: Path | None) -> Path:
    """The folder of results to read: --out, else docs/results below the current folder, else that of the checkout."""
    local = Path("docs/results")
    if out is not None:
        return out
    return local if local.is_dir() or not CHECKOUT.is_dir() else CHECKOUT


def entry(name: str, folder: Path) -> Entry:
    """An experiment judged on FOLDER/NAME.csv, if the file has results of all arms of the settings FULL.

    Otherwise the entry says what is missing: a part of the results could make a claim look better than it is.
    """
    module, text, path = load(name), docstring(name), folder / f"{name}.csv"
    title, paper = text.splitlines()[0], section(text, "Paper")
    if not path.exists():
        reason = f"no results: {path} does not exist; `fastweights reproduce {name}` makes it"
        return Entry(name, title, paper, [], reason)
    rows_by_arm = read_csv(path)
    keys = [arm_key(arm) for arm in module.arms(**module.FULL)]
    missing = sum(key not in rows_by_arm for key in keys)
    if missing:
        reason = f"{missing} of {len(keys)} arms have no results in {path}; the rest is not judged"
        return Entry(name, title, paper, [], reason)
    return Entry(name, title, paper, judge(module, [row for key in keys for row in rows_by_arm[key]]))


def entries(folder: Path) -> list[Entry]:
    """All experiments, judged on the results in a folder."""
    return [entry(name, folder) for name in EXPERIMENTS]


def _published(entries: list[Entry]) -> list[Judgement]:
    """The judgements of claims that papers make; statements of our own are not counted on the scoreboard."""
    return [j for entry in entries for j in entry.judged if j.claim.source != OURS]


def counts(entries: list[Entry]) -> str:
    """`20 reproduced, 9 partly, 1 not, 5 opposite`: how many of the papers' claims have each verdict."""
    count = Counter(j.verdict for j in _published(entries))
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS)


def _count_line(entry: Entry) -> str:
    """A line of the table of counts: how many claims of one experiment have each verdict."""
    count = Counter(j.verdict for j in _published([entry]))
    return f"| [{entry.name}](#{entry.name}) | " + " | ".join(str(count[verdict] or "") for verdict in VERDICTS) + " |"


def _links(folder: Path) -> list[str]:
    """A list of the other pages of the folder by their titles, pages of experiments last, in their order."""
    titles = {
        p.name: p.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for p in sorted(folder.glob("*.md"))
    }
    titles.pop(PAGE, None)
    experiments = [f"{name}.md" for name in EXPERIMENTS if f"{name}.md" in titles]
    others = [name for name in titles if name not in experiments]
    if not titles:
        return []
    return ["Pages:", "", *(f"- [{titles[name]}]({name})" for name in others + experiments), ""]


def page(folder: Path) -> str:
    """The scoreboard as a page of Markdown, the first page of a folder of results.

    Counts of verdicts, links to the other pages of the folder, how to run an experiment again, then for each experiment
    a table with a line for each claim.
    """
    experiments = entries(folder)
    claims = len(_published(experiments))
    lines = [
        "# Results",
        "",
        "<!-- Made by `fastweights reproduce --scoreboard` from the CSV files in this folder. -->",
        "",
        f"What the papers claim, and what this code found. Of {claims} claims: {counts(experiments)}.",
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
        *(_count_line(entry) for entry in experiments),
        "",
        *_links(folder),
        "To run one again: `fastweights reproduce NAME --data FOLDER`. Nothing is downloaded; FOLDER holds the corpora",
        "that the experiment reads, of `wikitext-2/wiki.{train,valid,test}.tokens`, `enwik8` (or `enwik8.xz`),",
        "`babi/en/qa*.txt` and `multi30k/{train,val,test_2016_flickr}.{en,de}`; with `--smoke` none is needed.",
        "",
    ]
    for entry in experiments:
        lines += _experiment_lines(entry, folder)
    return "\n".join(lines)


def _experiment_lines(entry: Entry, folder: Path) -> list[str]:
    """Lines of the scoreboard about one experiment: its title with links, and a table of its claims."""
    name = entry.name
    files = f" ([figure]({name}.png), [CSV]({name}.csv))" if not entry.reason else ""
    findings = f" [What was found]({name}.md)." if (folder / f"{name}.md").exists() else ""
    head = f"{entry.title} `fastweights reproduce {name}`{files}. {entry.paper}{findings}"
    lines = [f"## {name}", "", head, ""]
    if entry.reason:
        return [*lines, f"Not judged: {entry.reason}.", ""]
    lines += ["| claim | verdict | ours | published | seeds | our size |", "|---|---|---|---|---|---|"]
    for j in entry.judged:
        published = OURS if j.claim.source == OURS else f"{j.claim.published} ({j.claim.source})"
        cells = j.claim.says, f"**{j.verdict}**", j.ours, published, str(j.seeds), j.size
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]
