"""State tracking: the product of all permutations so far, by writes per token and largest write rate.

Paper: Siems et al. 2025, "DeltaProduct" (word problems of groups); Grazzi et al. 2025, "Unlocking State-Tracking in
    Linear RNNs Through Negative Eigenvalues".
Claim: a memory of one layer whose write rates end at 1 tracks no permutation group; with rates up to 2, so that a write
    can reflect, n writes per token track the permutations of n + 1 things.
Cost: minutes of one H200 that 8 processes share; on a CPU only the smoke settings.
Differs: words are fresh at every step and products of few elements count first; labels are smoothed by 0.1; the models
    are 64 wide with 4 heads, and the writes of a head have no convolution; several models train side by side.
"""

from pathlib import Path
from typing import Any

from fastweights.lab.engine import plotting
from fastweights.lab.engine.averages import Average, averages, select
from fastweights.lab.engine.claims import OURS, Claim, Verdict, all_hold
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row

FULL: dict[str, Any] = dict(
    groups=("S3", "S4", "A5", "S5"), writes=(1, 2, 3, 4), controls=("softmax", "gated-delta"), length=128, tested=512,
    dim=64, heads=4, key_dim=32, batch=64, steps=dict(S3=4000, S4=4000, A5=4000, S5=8000), lr=1e-2, seeds=3,
)  # fmt: skip
SMOKE: dict[str, Any] = dict(
    groups=("S3",), writes=(2,), controls=("softmax",), length=16, tested=32, dim=32, heads=2, key_dim=16, batch=32,
    steps=dict(S3=160), lr=1e-2, seeds=1,
)  # fmt: skip
BETA_MAX = (1.0, 2.0)  # largest write rates of the delta rule
ENOUGH = dict(S3=2, S4=3, A5=4, S5=4)  # writes per token that give every permutation as that many swaps
ROTATIONS = ("S4", "A5")  # the rotations of a cube and of an icosahedron: two reflections each
SMOOTHING = 0.1  # of the labels
# Until this share of the steps is done, words are 1 / n of the full length, and there are n times as many of them
PHASES = ((0.4, 8), (0.6, 2), (1.0, 1))
SHORTEST = 16  # tokens, which words have at least
EVERYTHING = 0.8  # from this share of the steps on, all tokens of a word count for every model
SOLVED = 0.9  # share of right products
TEST = 10_000  # added to a seed: other words than in training
# Of the delta rule, by writes per token
COLOURS = {1: plotting.PALETTE[0], 2: plotting.PALETTE[1], 3: plotting.PALETTE[4], 4: plotting.PALETTE[3]}


def arms(
    *,
    groups: tuple[str, ...],
    writes: tuple[int, ...],
    controls: tuple[str, ...],
    length: int,
    tested: int,
    dim: int,
    heads: int,
    key_dim: int,
    batch: int,
    steps: dict[str, int],
    lr: float,
    seeds: int,
) -> list[Arm]:
    """One arm for each group and each number of writes or control; its copies have weights and words of their own.

    Args:
        groups: permutations of 3 to 5 things; "A5" is the even ones alone.
        writes: numbers of writes per token of the delta rule, each with all of BETA_MAX.
        controls: other mixers, with one write per token.
        length: tokens of a word in training.
        tested: tokens of the longest word that is tested.
        dim, heads, key_dim: width, heads and key width of the models.
        batch: words of each copy in a step.
        steps: of training, by group.
        lr: the peak learning rate.
        seeds: copies of each model.
    """
    sizes = dict(length=length, tested=tested, dim=dim, heads=heads, key_dim=key_dim, batch=batch)
    models = [*(("delta", n) for n in writes), *((name, 1) for name in controls)]
    return [
        dict(group=group, model=model, writes=n, **sizes, steps=steps[group], lr=lr, seed=0, seeds=seeds)
        for group in groups
        for model, n in models
    ]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU, which grow with the writes and with the number of copies."""
    return (2 + 3 * arm["writes"] * len(_beta_max(arm["model"]))) * arm["steps"] / 1000


def _beta_max(model: str) -> tuple[float, ...]:
    """The largest write rates that a model is trained with."""
    return BETA_MAX if model == "delta" else (1.0,)


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train the copies of one arm side by side on fresh words, and test each on longer words.

    Words are short at first (PHASES), and of a word only the first products count, as many as a copy has learned: a
    product can be found only when the one before it is.

    Returns:
        A row for each copy and length: the share of right products, and how many tokens counted in the end.
    """
    import torch

    from fastweights.lab.engine.training_step import TrainingStep, cosine_schedule
    from fastweights.lab.tasks.permutation_trackers import Trackers, accuracy, losses
    from fastweights.lab.tasks.permutation_words import Curriculum, multiplication_table, words

    beta_max = [beta for beta in _beta_max(arm["model"]) for _ in range(arm["seeds"])]  # of each copy
    copies, steps = len(beta_max), arm["steps"]
    table = multiplication_table(arm["group"]).to(device)
    generator = torch.Generator(device).manual_seed(arm["writes"])
    model = Trackers(
        len(table),
        arm["model"],
        beta_max=beta_max,
        writes=arm["writes"],
        dim=arm["dim"],
        heads=arm["heads"],
        key_dim=arm["key_dim"],
    ).to(device)
    last_losses = torch.zeros(copies, device=device)  # of the last step, in the same memory always

    def objective(tokens: torch.Tensor, products: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        each = losses(model, tokens, products, mask, SMOOTHING)
        last_losses.copy_(each.detach())
        return each.sum()

    step = TrainingStep(model, objective, device, lr=arm["lr"], weight_decay=0.0, clip=float(copies))
    curriculum = Curriculum(copies, len(table), SMOOTHING, device)
    for i in range(steps):
        part = next(part for share, part in PHASES if i < share * steps)
        length = max(arm["length"] // part, min(SHORTEST, arm["length"]))
        tokens, products = words(table, copies, arm["batch"] * arm["length"] // length, length, generator)
        mask = curriculum.mask(length, everything=i >= EVERYTHING * steps)
        step(cosine_schedule(i, steps, 50), tokens, products, mask)
        if i % 5 == 4:
            curriculum.update(last_losses, length - 1)
        if i % 200 == 199:
            progress = f"{min(curriculum.counts.tolist())} tokens or more, loss {float(last_losses.min()):.3f}"
            report(i / steps, f"{arm['group']} {arm['model']} {arm['writes']}, {progress}")
    lengths = [2**i for i in range(2, arm["tested"].bit_length())]
    generator.manual_seed(TEST + arm["writes"])
    shares = accuracy(model, table, lengths, generator)
    return [
        dict(copy=i % arm["seeds"], beta_max=beta, tokens=n, accuracy=share, learned=int(curriculum.counts[i]))
        for i, beta in enumerate(beta_max)
        for n, share in zip(lengths, shares[i], strict=True)
    ]


def _name(row: Row) -> str:
    """The name of a row's model in table and figure."""
    if row["model"] != "delta":
        return row["model"]
    writes = "1 write" if row["writes"] == 1 else f"{row['writes']} writes"
    return f"{writes}, beta <= {row['beta_max']:g}"


def table(rows: list[Row]) -> list[Row]:
    """A line for each group and model: the share of right products, at the length of training and at the longest."""
    shares = averages([row | dict(name=_name(row)) for row in rows], ("group", "name", "tokens"), "accuracy")
    lines: dict[tuple, Row] = {}
    for (group, name, tokens), share in shares.items():
        line = lines.setdefault((group, name), dict(group=group, model=name))
        if tokens in (rows[0]["length"], rows[0]["tested"]):
            line[f"{tokens} tokens"] = share.text(".2f")
    return list(lines.values())


def plot(rows: list[Row], path: Path) -> None:
    """Draw the share of right products against the length of the word, a panel for each group."""
    rows = [row | dict(name=_name(row)) for row in rows]
    shares = averages(rows, ("group", "name", "tokens"), "accuracy")
    groups = list(dict.fromkeys(row["group"] for row in rows))
    models = {row["name"]: row for row in rows}  # a row of each, in the order of the arms
    trained = rows[0]["length"]
    title = "Products of permutations by length of the word"
    note = (
        f"Right products in the later half of a word; trained on up to {trained} tokens (vertical line). "
        "Solid: write rates up to 2; dashed: up to 1, and controls. Bands: worst and best seed."
    )
    with plotting.figure(path, len(groups), size=(3.6, 3.4), title=title, note=note, share_y=True) as axes:
        panels = list(axes) if len(groups) > 1 else [axes]
        for ax, group in zip(panels, groups, strict=True):
            for name, row in models.items():
                is_delta = row["model"] == "delta"
                color = COLOURS[row["writes"]] if is_delta else plotting.colour(name)
                dashed = not is_delta or row["beta_max"] == 1
                plotting.average_curve(ax, select(shares, group, name), label=name, color=color, dashed=dashed)
            ax.axvline(trained, color=plotting.GREY, linewidth=1)
            ax.set_xscale("log", base=2)
            ax.set(title=group, xlabel="tokens in the word", ylim=(-0.02, 1.04))
        panels[0].set_ylabel("right products")
        plotting.legend(panels[-1], published=False, loc="center left", bbox_to_anchor=(1.02, 0.5))


def size(rows: list[Row]) -> str:
    """Groups, width, length and steps, for the scoreboard."""
    first = rows[0]
    groups = ", ".join(dict.fromkeys(row["group"] for row in rows))
    steps = " and ".join(f"{n:,}" for n in sorted({row["steps"] for row in rows}))
    return f"{groups}; {first['dim']} wide, {first['length']} tokens in training, {steps} steps"


def _shares(rows: list[Row], length: str = "tested") -> dict[tuple, Average]:
    """{(group, writes, model): share of right products, over seeds} of words of the longest length.

    length: "tested" for that, or "length" for the length of training.
    """
    return averages([row for row in rows if row["tokens"] == row[length]], ("group", "writes", "model"), "accuracy")


def _text(shares: dict[tuple, Average]) -> str:
    """Shares by group and model, as text."""
    models = [f"{group} n={writes}" if model == "delta" else f"{group} {model}" for group, writes, model in shares]
    return "; ".join(f"{name} {share.text('.2f')}" for name, share in zip(models, shares.values(), strict=True))


def _none_solves(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether no seed of any model gives SOLVED of the products of the longest words."""
    shares = _shares(rows)
    return all_hold(share.highest < SOLVED for share in shares.values()), _text(shares)


def _each_solves(shares: dict[tuple, Average]) -> tuple[Verdict, str]:
    """Whether the best seed of each model gives SOLVED of the products."""
    return all_hold(share.highest >= SOLVED for share in shares.values()), _text(shares)


def _enough_writes(rows: list[Row], length: str = "tested") -> dict[tuple, Average]:
    """`_shares` of the models with enough writes for their group."""
    return {key: share for key, share in _shares(rows, length).items() if key[1] >= ENOUGH[key[0]]}


def _swaps_suffice(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the best seed of each model with enough writes solves the longest words."""
    return _each_solves(_enough_writes(rows))


def _swaps_suffice_in_training(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the best seed of each model with enough writes solves words of the length of training."""
    return _each_solves(_enough_writes(rows, "length"))


def _rotations_need_two(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the best seed of each of these models solves the longest words."""
    return _each_solves(_shares(rows))


CLAIMS = (
    Claim(
        "rates-up-to-one-cannot",
        "With write rates up to 1 no number of writes tracks a group (all seeds below 0.9 at 512 tokens).",
        published="shown as curves",
        source="Siems et al. 2025, word problems of groups",
        judge=_none_solves,
        where=dict(model="delta", beta_max=1.0),
    ),
    Claim(
        "one-write-cannot",
        "One write per token tracks none of the groups in one layer, with rates up to 2 either.",
        published="shown as curves",
        source="Siems et al. 2025, word problems of groups",
        judge=_none_solves,
        where=dict(model="delta", beta_max=2.0, writes=1),
    ),
    Claim(
        "n-writes-track-n-plus-one-things",
        "With rates up to 2, n writes track S_(n+1) at four times the length of training (the best seed over 0.9).",
        published="shown as curves",
        source="Siems et al. 2025, word problems of groups",
        judge=_swaps_suffice,
        where=dict(model="delta", beta_max=2.0),
    ),
    Claim(
        "at-the-length-of-training",
        "The same at the length of training.",
        published="ours",
        source=OURS,
        judge=_swaps_suffice_in_training,
        where=dict(model="delta", beta_max=2.0),
    ),
    Claim(
        "rotations-need-two",
        "S4 and A5, the rotations of a cube and of an icosahedron, need two writes only (the best seed over 0.9).",
        published="shown as curves",
        source="Siems et al. 2025, word problems of groups",
        judge=_rotations_need_two,
        where=dict(model="delta", beta_max=2.0, writes=2, group=ROTATIONS),
    ),
    Claim(
        "controls-cannot",
        "Softmax attention and Gated DeltaNet, of one layer, track none of the groups.",
        published="shown as curves",
        source="Grazzi et al. 2025; Siems et al. 2025",
        judge=_none_solves,
        where=dict(model=("softmax", "gated-delta")),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Two writes that can reflect track S3; one layer of attention and rates up to 1 do not."""
    shares = {(r["model"], r["writes"], r["beta_max"]): r["accuracy"] for r in rows if r["tokens"] == r["tested"]}
    reflecting = shares.pop(("delta", 2, 2.0))
    others = max(shares.values())
    message = f"two writes with rates up to 2 give {reflecting:.2f} of S3's products; expected {SOLVED}"
    assert reflecting > SOLVED, message
    assert others < SOLVED, f"of models that cannot track S3 one gives {others:.2f}"
    return [
        f"two writes that reflect give {reflecting:.2f} of S3's products at twice the length of training, "
        f"the others at most {others:.2f}"
    ]
