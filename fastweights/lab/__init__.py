"""The lab: figures and tables of the papers again, at a size that one GPU does in minutes.

`fastweights reproduce --list` prints the experiments, claim by claim, with what our results say of each; so does
docs/results/README.md. The lab has three floors. papers/ has one file per figure or table, tasks/ the data and models
that are trained, engine/ what runs any experiment: processes, results on disk, claims, figures. Each floor imports
itself and later ones only.

An experiment is a module of papers/. Its docstring has a title and the sections Paper, Claim, Cost and Differs (what
is not as in the paper). It consists of, in this order,

    FULL, SMOKE                       settings of `arms`: those of the figure, and some that take seconds on one core
    arms(**settings) -> list[Arm]     independent units of work, each a flat dict of its settings
    cost(arm) -> float                about how many seconds an arm takes on a shared GPU; the longest arms run first
    data(arm) -> tuple[str, ...]      files that an arm reads, as patterns below the folder of --data; may be absent
    run(arm, *, device, report)       result rows of one arm, flat dicts; calls report(fraction, text) now and then
    table(rows) -> list[Row]          lines to print, our numbers beside the paper's
    plot(rows, path)                  the figure
    size(rows) -> str                 how large our experiment is, for the scoreboard
    CLAIMS                            what the paper says: sentences, published numbers, and judges of our rows
    check_smoke(rows) -> list[str]    assertions on the rows of SMOKE settings; sentences that say what was confirmed

where the rows that `table`, `plot` and the others take are those of all finished arms, with the fields of their arm.
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
