"""Sentences to translate: Multi30k English to German, or made-up ones; batches of them, and BLEU."""

import functools
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.core import FastWeightError
from fastweights.files import read_text

PAD, START, END, UNKNOWN = range(4)
LENGTHS = (16, 24, 32, 48)  # sentences are padded to one of these


@dataclass(frozen=True)
class Pairs:
    """Sentences as words, by split, and the numbers of words of both languages.

    Attributes:
        name: of the source.
        splits: "train", "valid" and "test", lists of (English words, German words).
        source, target: number of each word; PAD, START, END and UNKNOWN come first.
    """

    name: str
    splits: dict[str, list[tuple[list[str], list[str]]]]
    source: dict[str, int]
    target: dict[str, int]


@functools.lru_cache(2)
def load(data: Path | None, limit: int = 0) -> Pairs:
    """Multi30k English to German from the folder multi30k/ of `data`.  limit: sentences kept per split; 0 keeps all."""
    if data is None or not (data / "multi30k").is_dir():
        raise FastWeightError(f"data is {data}; expected a folder with multi30k/train.en, train.de and so on")
    names = dict(train="train", valid="val", test="test_2016_flickr")
    splits = {}
    for split, name in names.items():
        english, german = (_read(data / "multi30k" / f"{name}.{language}") for language in ("en", "de"))
        if len(english) != len(german):
            raise FastWeightError(f"{name} has {len(english)} English and {len(german)} German lines; expected pairs")
        splits[split] = list(zip(english, german, strict=True))[: limit or None]
    return _pairs("multi30k", splits)


def made_up(limit: int = 0) -> Pairs:
    """Sentences of six words whose verb goes to the end when they are translated."""
    rng = random.Random(0)
    sizes = dict(train=limit or 4000, valid=64, test=64)
    return _pairs("made up", {s: [_made_up(rng) for _ in range(n)] for s, n in sizes.items()})


def _pairs(name: str, splits: dict[str, list[tuple[list[str], list[str]]]]) -> Pairs:
    """Leave out training sentences that are too long, and number the words of the rest."""
    splits["train"] = [(a, b) for a, b in splits["train"] if max(len(a), len(b)) < LENGTHS[-1] - 1]
    source, target = (_numbers(pair[i] for pair in splits["train"]) for i in (0, 1))
    return Pairs(name, splits, source, target)


def _read(path: Path) -> list[list[str]]:
    """The lines of a file as words."""
    return [line.split() for line in read_text(path, "a sentence per line").splitlines()]


def _made_up(rng: random.Random) -> tuple[list[str], list[str]]:
    """An English sentence of six words and its translation."""
    noun = lambda: rng.randrange(6)  # noqa: E731
    a, verb, b, adjective = noun(), rng.randrange(4), noun(), rng.randrange(3)
    return (
        ["the", f"noun{a}", f"verb{verb}", "a", f"adjective{adjective}", f"noun{b}"],
        ["das", f"wort{a}", "ein", f"eigen{adjective}", f"wort{b}", f"tun{verb}"],
    )


def _numbers(sentences: Any) -> dict[str, int]:
    """Of words seen at least twice."""
    counts = Counter(w for s in sentences for w in s)
    return {w: i + 4 for i, w in enumerate(w for w, n in counts.items() if n > 1)}


def arrays(pairs: list, found: Pairs, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of about `tokens` words, sentences of like length together.

    Args:
        pairs: (English words, German words).
        found: whose numbers of words to use.
        tokens: words of a batch, padding included.

    Returns:
        source (B, T) ending in END, target (B, T + 1) from START to END; PAD after.
    """
    groups: dict[int, list] = {}
    for a, b in pairs:
        groups.setdefault(next(n for n in LENGTHS if max(len(a), len(b)) < n), []).append((a, b))
    made = []
    for length, group in sorted(groups.items()):
        rows = max(1, tokens // length)
        for at in range(0, len(group), rows):
            source, target = np.full((rows, length), PAD), np.full((rows, length + 1), PAD)
            for i, (a, b) in enumerate(group[at : at + rows]):
                source[i, : len(a) + 1] = [found.source.get(w, UNKNOWN) for w in a] + [END]
                target[i, : len(b) + 2] = [START, *(found.target.get(w, UNKNOWN) for w in b), END]
            source[len(group[at : at + rows]) :, 0] = END  # attention over nothing has no value
            made.append((source, target))
    return made


def bleu(hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """BLEU of tokenised text and who computed it: sacrebleu, or the same formula here where it is not installed."""
    try:
        import sacrebleu
    except ImportError:
        return corpus_bleu(hypotheses, references), "own formula"
    score = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True).score
    return float(score), f"sacrebleu {sacrebleu.__version__}"


def corpus_bleu(hypotheses: list[str], references: list[str]) -> float:
    """BLEU in percent: geometric mean of the precisions of 1 to 4 words, times the brevity penalty.

    Precisions of 0 are smoothed as sacrebleu does.
    """
    right, total, ours, theirs = [0] * 4, [0] * 4, 0, 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        a, b = hypothesis.split(), reference.split()
        ours, theirs = ours + len(a), theirs + len(b)
        for n in range(4):
            x, y = (Counter(tuple(w[i : i + n + 1]) for i in range(len(w) - n)) for w in (a, b))
            right[n], total[n] = right[n] + sum((x & y).values()), total[n] + sum(x.values())
    if not all(total) or not right[0]:
        return 0.0
    logs, smooth = 0.0, 1.0
    for r, t in zip(right, total, strict=True):
        smooth = smooth if r else smooth * 2
        logs += math.log(100 * r / t if r else 100 / (smooth * t))
    return math.exp(logs / 4) * min(1.0, math.exp(1 - theirs / ours))
