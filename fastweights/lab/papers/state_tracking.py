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
from fastweights.lab.engine.averages import Average, averages
from fastweights.lab.engine.claims import OURS, Claim, Verdict, all_hold
from fastweights.lab.engine.experiment import Report
from fastweights.lab.engine.results import Arm, Row

FULL: dict[str, Any] = dict(groups=("S3", "S4", "A5", "S5"), writes=(1, 2, 3, 4), controls=("softmax", "gated-delta"),
                            length=128, tested=512, dim=64, heads=4, key_dim=32, batch=64,
                            steps=dict(S3=4000, S4=4000, A5=4000, S5=8000), lr=1e-2, seeds=3)  # fmt: skip
SMOKE: dict[str, Any] = dict(groups=("S3",), writes=(2,), controls=("softmax",), length=16, tested=32, dim=32,
                             heads=2, key_dim=16, batch=32, steps=dict(S3=160), lr=1e-2, seeds=1)  # fmt: skip
RATES = (1.0, 2.0)  # largest write rates
ENOUGH = dict(S3=2, S4=3, A5=4, S5=4)  # writes per token that give every permutation as that many swaps
ROTATIONS = ("S4", "A5")  # the rotations of a cube and of an icosahedron: two reflections each
WRITES = [plotting.PALETTE[i] for i in (0, 1, 4, 3)]  # colours of 1 to 4 writes; the controls have their own
SMOOTHING = 0.1  # of the labels
# Until this share of the steps, words of 1 / part of the length, and as many more of them
PHASES = ((0.4, 8), (0.6, 2), (1.0, 1))
ALL = 0.8  # from this share of the steps on, all tokens of a word count for every model
SOLVED = 0.9  # share of right products
TEST = 10_000  # added to an arm's seed: other words than in training


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
    """One per group and number of writes, or control: copies with weights and words of their own, of both RATES.

    Args:
        groups: names of POINTS: permutations of 3 to 5 things, "A5" the even ones alone.
        writes: numbers of writes per token of the delta rule.
        controls: other mixers, of one write.
        length, tested: tokens of a word in training, and of the longest that is tested.
        dim, heads, key_dim: of the models.
        batch: words per step.
        steps: by group.
        lr: learning rate.
        seeds: copies of each.
    """
    sizes = dict(length=length, tested=tested, dim=dim, heads=heads, key_dim=key_dim, batch=batch)
    models = [*(("delta", n) for n in writes), *((name, 1) for name in controls)]
    return [
        dict(group=g, model=model, writes=n, **sizes, steps=steps[g], lr=lr, seed=0, seeds=seeds)
        for g in groups
        for model, n in models
    ]


def cost(arm: Arm) -> float:
    """Seconds of an arm on a shared GPU, which grow with the writes and, for the delta rule, with both RATES."""
    return (2 + 3 * arm["writes"] * (2 if arm["model"] == "delta" else 1)) * arm["steps"] / 1000


def run(arm: Arm, *, device: str, report: Report) -> list[Row]:
    """Train the copies of one arm side by side on fresh words, and test each on longer ones.

    Words are short at first (PHASES), and of a word only the first products count, as many as a copy has learned: a
    product can be found only when the one before it is.

    Returns:
        A row per copy and length: the share of right products, and the tokens that counted in the end.
    """
    import torch

    from fastweights.lab.engine.training_step import TrainingStep, cosine_schedule
    from fastweights.lab.tasks import permutation_trackers
    from fastweights.lab.tasks import permutation_words as task

    rates = [top for top in (RATES if arm["model"] == "delta" else (1.0,)) for _ in range(arm["seeds"])]
    table = task.multiplication_table(arm["group"]).to(device)
    generator = torch.Generator(device).manual_seed(arm["writes"])
    model = permutation_trackers.Trackers(
        len(table),
        arm["model"],
        beta_max=rates,
        writes=arm["writes"],
        dim=arm["dim"],
        heads=arm["heads"],
        key_dim=arm["key_dim"],
    ).to(device)
    found = torch.zeros(len(rates), device=device)  # the losses of the last step

    def objective(tokens: Any, products: Any, counted: Any) -> Any:
        each = permutation_trackers.losses(model, tokens, products, counted, SMOOTHING)
        found.copy_(each.detach())
        return each.sum()

    step = TrainingStep(model, objective, device, lr=arm["lr"], weight_decay=0.0, clip=float(len(rates)))
    course, steps = task.Course(len(rates), len(table), SMOOTHING, device), arm["steps"]
    for i in range(steps):
        part = next(part for share, part in PHASES if i < share * steps)
        length = max(arm["length"] // part, min(16, arm["length"]))
        words = task.words(table, len(rates), arm["batch"] * arm["length"] // length, length, generator)
        step(cosine_schedule(i, steps, 50), *words, course.counted(length, i >= ALL * steps))
        if i % 5 == 4:
            course.learn(found, length - 1)
        if i % 200 == 199:
            far = f"{min(course.counts.tolist())} tokens or more, loss {float(found.min()):.3f}"
            report(i / steps, f"{arm['group']} {arm['model']} {arm['writes']}, {far}")
    lengths = [2**i for i in range(2, arm["tested"].bit_length())]
    generator.manual_seed(TEST + arm["writes"])
    shares = permutation_trackers.accuracy(model, table, lengths, generator)
    return [
        dict(copy=i % arm["seeds"], beta_max=top, tokens=n, accuracy=share, learned=int(course.counts[i]))
        for i, top in enumerate(rates)
        for n, share in zip(lengths, shares[i], strict=True)
    ]


def label(row: Row) -> str:
    """The name of a row's model in tables and figures."""
    writes, most = row["writes"], row["beta_max"]
    return (
        f"{writes} {'write' if writes == 1 else 'writes'}, beta <= {most:g}"
        if row["model"] == "delta"
        else row["model"]
    )


def table(rows: list[Row]) -> list[Row]:
    """A line per group and model: the share of right products at the length of training and at the longest, with its
    range.
    """
    named = [r | dict(name=label(r)) for r in rows]
    means = averages(named, ("group", "name", "tokens"), "accuracy")
    shown: dict[tuple, dict[str, Any]] = {}
    longest, trained = rows[0]["tested"], rows[0]["length"]
    for (group, name, n), (mean, low, high) in means.items():
        line = shown.setdefault((group, name), dict(group=group, model=name))
        if n in (trained, longest):
            line[f"{n} tokens"] = Average(mean, low, high).text(".2f")
    return list(shown.values())


def plot(rows: list[Row], path: Path) -> None:
    """Right products against the length of the word, a panel per group."""
    groups = list(dict.fromkeys(r["group"] for r in rows))
    rows = [r | dict(name=label(r)) for r in rows]
    means = averages(rows, ("group", "name", "tokens"), "accuracy")
    names = list(dict.fromkeys(r["name"] for r in rows))
    trained = rows[0]["length"]
    note = (
        f"Right products in the later half of a word; trained on up to {trained} tokens (vertical line). "
        "Solid: write rates up to 2; dashed: up to 1, and controls. Bands: worst and best seed."
    )
    with plotting.figure(
        path,
        len(groups),
        size=(3.6, 3.4),
        title="Products of permutations by length of the word",
        note=note,
        share_y=True,
    ) as axes:
        panels = list(axes) if len(groups) > 1 else [axes]
        for ax, group in zip(panels, groups, strict=True):
            for name in names:
                points = {n: v for (g, m, n), v in means.items() if (g, m) == (group, name)}
                x = sorted(points)
                if not x:
                    continue
                known = name in plotting.COLOURS
                color = plotting.COLOURS[name] if known else WRITES[int(name[0]) - 1]
                plotting.curve(
                    ax,
                    x,
                    [points[n][0] for n in x],
                    label=name,
                    color=color,
                    dashed=known or name.endswith(" 1"),
                    band=([points[n][1] for n in x], [points[n][2] for n in x]),
                )
            ax.axvline(trained, color=plotting.GREY, linewidth=1)
            ax.set_xscale("log", base=2)
            ax.set(title=group, xlabel="tokens in the word", ylim=(-0.02, 1.04))
        panels[0].set_ylabel("right products")
        plotting.legend(panels[-1], published=False, loc="center left", bbox_to_anchor=(1.02, 0.5))


def size(rows: list[Row]) -> str:
    """Groups, width, length and steps, for the scoreboard."""
    first = rows[0]
    groups = ", ".join(dict.fromkeys(r["group"] for r in rows))
    steps = " and ".join(f"{n:,}" for n in sorted({r["steps"] for r in rows}))
    return f"{groups}; {first['dim']} wide, {first['length']} tokens in training, {steps} steps"


def _longest(rows: list[Row], tokens: str = "tested") -> dict[tuple, Average]:
    """{(group, writes, model): mean, lowest and highest seed} for words of the longest length, or of training's."""
    asked = [r for r in rows if r["tokens"] == r[tokens]]
    return averages(asked, ("group", "writes", "model"), "accuracy")


def _shown(found: dict[tuple, Average]) -> str:
    """Shares by group and number of writes, as text."""
    return "; ".join(
        f"{group} {f'{model} ' if model != 'delta' else f'n={n} '}{x.text('.2f')}"
        for (group, n, model), x in found.items()
    )


def _none_solves(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether no seed of any model gives SOLVED of the products of the longest words."""
    found = _longest(rows)
    return all_hold(high < SOLVED for _, _, high in found.values()), _shown(found)


def _enough_writes(rows: list[Row]) -> dict[tuple, Average]:
    """Shares at the longest length of the models with enough writes for their group."""
    return {k: x for k, x in _longest(rows).items() if k[1] >= ENOUGH[k[0]]}


def _swaps_suffice(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the best seed of each model with enough writes solves the longest words."""
    found = _enough_writes(rows)
    return all_hold(high >= SOLVED for _, _, high in found.values()), _shown(found)


def _in_training(rows: list[Row]) -> tuple[Verdict, str]:
    """The same at the length of training."""
    found = {k: x for k, x in _longest(rows, "length").items() if k[1] >= ENOUGH[k[0]]}
    return all_hold(high >= SOLVED for _, _, high in found.values()), _shown(found)


def _rotations_need_two(rows: list[Row]) -> tuple[Verdict, str]:
    """Whether the best seed of each of these models solves the longest words."""
    found = _longest(rows)
    return all_hold(high >= SOLVED for _, _, high in found.values()), _shown(found)


CLAIMS = (
    Claim(
        "rates-up-to-one-cannot",
        "With write rates up to 1 no number of writes tracks a group (all seeds below 0.9 at 512 tokens).",
        "shown as curves",
        "Siems et al. 2025, word problems of groups",
        _none_solves,
        dict(model="delta", beta_max=1.0),
    ),
    Claim(
        "one-write-cannot",
        "One write per token tracks none of the groups in one layer, with rates up to 2 either.",
        "shown as curves",
        "Siems et al. 2025, word problems of groups",
        _none_solves,
        dict(model="delta", beta_max=2.0, writes=1),
    ),
    Claim(
        "n-writes-track-n-plus-one-things",
        "With rates up to 2, n writes track S_(n+1) at four times the length of training (the best seed over 0.9).",
        "shown as curves",
        "Siems et al. 2025, word problems of groups",
        _swaps_suffice,
        dict(model="delta", beta_max=2.0),
    ),
    Claim(
        "at-the-length-of-training",
        "The same at the length of training.",
        "ours",
        OURS,
        _in_training,
        dict(model="delta", beta_max=2.0),
    ),
    Claim(
        "rotations-need-two",
        "S4 and A5, the rotations of a cube and of an icosahedron, need two writes only (the best seed over 0.9).",
        "shown as curves",
        "Siems et al. 2025, word problems of groups",
        _rotations_need_two,
        dict(model="delta", beta_max=2.0, writes=2, group=ROTATIONS),
    ),
    Claim(
        "controls-cannot",
        "Softmax attention and Gated DeltaNet, of one layer, track none of the groups.",
        "shown as curves",
        "Grazzi et al. 2025; Siems et al. 2025",
        _none_solves,
        dict(model=("softmax", "gated-delta")),
    ),
)


def check_smoke(rows: list[Row]) -> list[str]:
    """Two writes that can reflect track S3; one layer of attention and rates up to 1 do not."""
    ours = {(r["model"], r["writes"], r["beta_max"]): r["accuracy"] for r in rows if r["tokens"] == r["tested"]}
    reflects, cannot = ours["delta", 2, 2.0], {k: x for k, x in ours.items() if k != ("delta", 2, 2.0)}
    assert reflects > SOLVED, f"two writes with rates up to 2 give {reflects:.2f} of S3's products; expected {SOLVED}"
    assert max(cannot.values()) < SOLVED, f"of models that cannot track S3 one gives {max(cannot.values()):.2f}"
    return [
        f"two writes that reflect give {reflects:.2f} of S3's products at twice the length of training, "
        f"the others at most {max(cannot.values()):.2f}"
    ]
