"""Sentences to translate: Multi30k English to German, or made-up ones; batches of them, and BLEU."""

import functools
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastweights.core import FastWeightError
from fastweights.files import read_text

Sentence = list[str]  # of words
PAD, START, END, UNKNOWN = range(4)  # numbers that come before those of words
LENGTHS = (16, 24, 32, 48)  # sentences are padded to one of these


@dataclass(frozen=True)
class Pairs:
    """English sentences with their German translations, and the vocabularies of both languages.

    Attributes:
        name: of the source.
        splits: "train", "valid" and "test", each a list of (English words, German words).
        source, target: the number of each English and of each German word, from 4 on.
    """

    name: str
    splits: dict[str, list[tuple[Sentence, Sentence]]]
    source: dict[str, int]
    target: dict[str, int]


@functools.lru_cache(2)
def load(data: Path | None, limit: int = 0) -> Pairs:
    """Multi30k, English to German.

    Args:
        data: folder of the user's files, which has the corpus in multi30k/.
        limit: number of sentences of each split that are kept; 0 keeps all.
    """
    if data is None or not (data / "multi30k").is_dir():
        raise FastWeightError(f"data is {data}; expected a folder with multi30k/train.en, train.de and so on")
    names = dict(train="train", valid="val", test="test_2016_flickr")
    splits = {}
    for split, name in names.items():
        english, german = (_read(data / "multi30k" / f"{name}.{language}") for language in ("en", "de"))
        if len(english) != len(german):
            raise FastWeightError(f"{name} has {len(english)} English and {len(german)} German lines; expected pairs")
        splits[split] = list(zip(english, german, strict=True))[: limit or None]
    return _to_pairs("multi30k", splits)


def made_up(limit: int = 0) -> Pairs:
    """Made-up sentences of six words, whose verb goes to the end when they are translated.

    Args:
        limit: number of training sentences; 4,000 when 0.
    """
    rng = random.Random(0)
    sizes = dict(train=limit or 4000, valid=64, test=64)
    return _to_pairs("made up", {split: [_make_pair(rng) for _ in range(size)] for split, size in sizes.items()})


def _to_pairs(name: str, splits: dict[str, list[tuple[Sentence, Sentence]]]) -> Pairs:
    """Leave out training sentences that are too long, and number the words of the others."""
    splits["train"] = [pair for pair in splits["train"] if max(map(len, pair)) < LENGTHS[-1] - 1]
    source = _number_words(english for english, _ in splits["train"])
    target = _number_words(german for _, german in splits["train"])
    return Pairs(name, splits, source, target)


def _read(path: Path) -> list[Sentence]:
    """The lines of a file as words."""
    return [line.split() for line in read_text(path, "a sentence per line").splitlines()]


def _make_pair(rng: random.Random) -> tuple[Sentence, Sentence]:
    """An English sentence of six words and its translation."""
    subject, verb, object_, adjective = rng.randrange(6), rng.randrange(4), rng.randrange(6), rng.randrange(3)
    return (
        ["the", f"noun{subject}", f"verb{verb}", "a", f"adjective{adjective}", f"noun{object_}"],
        ["das", f"wort{subject}", "ein", f"eigen{adjective}", f"wort{object_}", f"tun{verb}"],
    )


def _number_words(sentences: Iterable[Sentence]) -> dict[str, int]:
    """Numbers of the words that are seen at least twice."""
    counts = Counter(word for sentence in sentences for word in sentence)
    known = [word for word, count in counts.items() if count > 1]
    return {word: i + 4 for i, word in enumerate(known)}


def encode(sentence: Sentence, numbers: dict[str, int]) -> list[int]:
    """The numbers of a sentence's words, and END."""
    return [*(numbers.get(word, UNKNOWN) for word in sentence), END]


def batches(
    sentences: list[tuple[Sentence, Sentence]], vocabularies: Pairs, tokens: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of sentences of similar length, padded to one of LENGTHS.

    Args:
        sentences: (English words, German words).
        vocabularies: the pairs whose numbers of words are used.
        tokens: number of words in a batch, padding included.

    Returns:
        For each batch: source (B, T), sentences that end in END; target (B, T + 1), sentences from START to END; after
        that PAD. The last batch of a length is filled up with rows of nothing but END in the source.
    """
    by_length: dict[int, list[tuple[Sentence, Sentence]]] = {}
    for pair in sentences:
        length = next(length for length in LENGTHS if max(map(len, pair)) < length)
        by_length.setdefault(length, []).append(pair)
    result = []
    for length, group in sorted(by_length.items()):
        rows = max(1, tokens // length)
        for start in range(0, len(group), rows):
            pairs = group[start : start + rows]
            source, target = np.full((rows, length), PAD), np.full((rows, length + 1), PAD)
            for i, (english, german) in enumerate(pairs):
                source[i, : len(english) + 1] = encode(english, vocabularies.source)
                target[i, : len(german) + 2] = [START, *encode(german, vocabularies.target)]
            source[len(pairs) :, 0] = END  # attention over nothing has no value
            result.append((source, target))
    return result


def bleu(hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """BLEU of tokenised text, and who computed it: sacrebleu, or the same formula here where it is not installed."""
    try:
        import sacrebleu
    except ImportError:
        return corpus_bleu(hypotheses, references), "own formula"
    score = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True).score
    return float(score), f"sacrebleu {sacrebleu.__version__}"


def corpus_bleu(hypotheses: list[str], references: list[str]) -> float:
    """BLEU in percent: the geometric mean of the precisions of 1 to 4 words in a row, times the brevity penalty.

    A precision of 0 is smoothed as sacrebleu does: the first counts as 1/2 of a match, the next as 1/4, and so on.
    """
    matches, total = [0] * 4, [0] * 4  # of n words in a row, n = 1 to 4
    hypothesis_length = reference_length = 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        sentences = hypothesis.split(), reference.split()
        hypothesis_length += len(sentences[0])
        reference_length += len(sentences[1])
        for n in range(1, 5):
            ours, theirs = (Counter(tuple(s[i : i + n]) for i in range(len(s) - n + 1)) for s in sentences)
            matches[n - 1] += sum((ours & theirs).values())
            total[n - 1] += sum(ours.values())
    if not all(total) or not matches[0]:
        return 0.0
    log_precisions, smoothing = 0.0, 1.0
    for m, t in zip(matches, total, strict=True):
        if m:
            log_precisions += math.log(100 * m / t)
        else:
            smoothing *= 2
            log_precisions += math.log(100 / (smoothing * t))
    brevity_penalty = min(1.0, math.exp(1 - reference_length / hypothesis_length))
    return math.exp(log_precisions / 4) * brevity_penalty
