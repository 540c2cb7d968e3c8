"""The lab: every figure and table of the papers, one file and one command each (`fastweights reproduce --list`).

An experiment is a module here with

    FULL, SMOKE                       settings of `arms`: what the figure needs, and seconds on one core
    arms(**settings) -> list[dict]    independent units of work, each a flat dict that says what it is
    run(arm, *, device, report)       the rows (flat dicts) of one arm; calls report(fraction, text) now and then
    plot(rows, path)                  the figure
    check(rows, smoke) -> list[str]   the claim as assertions; lines that say what was confirmed
    table(rows) -> list[dict]         optional: what to print, ours beside the paper's
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
)
