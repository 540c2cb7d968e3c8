"""The lab: figures and tables of the papers again, at a size that one GPU does in minutes.

`fastweights reproduce --list` says what there is, claim by claim, and what our results say of it; so does
docs/results/README.md. Three floors: papers/ has one file per figure or table, tasks/ what they train (data, models),
engine/ what runs them (processes, results on disk, claims, figures). Each imports its own and later floors only.

An experiment is a module of papers/ with

    FULL, SMOKE                       settings of `arms`: what the figure needs, and seconds on one core
    arms(**settings) -> list[dict]    independent units of work, each a flat dict that says what it is
    run(arm, *, device, report)       the rows (flat dicts) of one arm; calls report(fraction, text) now and then
    plot(rows, path)                  the figure
    CLAIMS                            what the paper says: sentences, published numbers, and judges of our rows
    size(rows) -> str                 how large our experiment is, for the scoreboard
    check_smoke(rows) -> list[str]    assertions on the rows of SMOKE settings; lines that say what was confirmed
    table(rows) -> list[dict]         optional: what to print, ours beside the paper's
    data(arm) -> tuple[str, ...]      optional: files an arm reads, as patterns below the folder given with --data
    cost(arm) -> float                optional: seconds, about, where processes share a GPU; the longest go first

and a docstring that says the title, Paper:, Claim:, Cost: and Differs:.
"""

EXPERIMENTS = (
    "capacity",
    "overwrite",
    "normalisation",
    "associative",
    "language-model",
    "fast-weight-layers",
    "recall",
    "question-answering",
    "translation",
    "state-tracking",
)
