"""Stories with questions: bAbI's twenty tasks, or made-up facts of the same kind, and who answers them.

A story is one sequence of words with its questions where they are asked; the answer is wanted at the question mark and
never stands in the text. Several words, as in "milk,football", are one answer.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastweights.core import FastWeightError
from fastweights.files import read_text
from fastweights.lab.engine import training_step

TASKS = (
    "single fact", "two facts", "three facts", "two relations", "three relations", "yes or no", "counting", "lists",
    "negation", "indefinite", "coreference", "conjunction", "compound coreference", "time", "deduction", "induction",
    "positions", "sizes", "paths", "motivations",
)  # fmt: skip
WORD = re.compile(r"[\w']+|[.?]")


@dataclass(frozen=True)
class Story:
    """One story: the task that it is of, its words, and where an answer is wanted.

    Attributes:
        task: from 1.
        words: of the story and of its questions.
        answers: (index of the question mark, answer).
    """

    task: int  # from 1
    words: tuple[str, ...]
    answers: tuple[tuple[int, str], ...]  # (index of the question mark, answer)


@dataclass(frozen=True)
class Stories:
    """Stories to train and test on, and their vocabularies.

    Attributes:
        name: of the source.
        train, test: stories.
        words: number of each word, from 1; 0 is padding.
        answers: number of each answer, from 0.
    """

    name: str
    train: list[Story]
    test: list[Story]
    words: dict[str, int]
    answers: dict[str, int]


@functools.lru_cache(2)
def load(data: Path | None, limit: int = 0) -> Stories:
    """bAbI's twenty tasks from the folder babi/en/ of `data`.  limit: stories kept of each task; 0 keeps all."""
    if data is None or not (data / "babi" / "en").is_dir():
        raise FastWeightError(f"data is {data}; expected a folder with babi/en/qa1_..._train.txt and so on")
    return to_stories(
        "babi",
        *(
            [s for t in range(1, 21) for s in _read(data / "babi" / "en", t, split)[: limit or None]]
            for split in ("train", "test")
        ),
    )


def to_stories(name: str, train: list[Story], test: list[Story]) -> Stories:
    """Number the words and answers of stories."""
    words = sorted({w for s in train + test for w in s.words})
    answers = sorted({a for s in train + test for _, a in s.answers})
    return Stories(name, train, test, {w: i + 1 for i, w in enumerate(words)}, {a: i for i, a in enumerate(answers)})


def _read(folder: Path, task: int, split: str) -> list[Story]:
    """The stories in the file of a task: a line numbered 1 starts one, a tab comes before an answer.

    Args:
        folder: of the corpus.
        task: its number, from 1 to 20.
        split: "train" or "test".
    """
    path = next(iter(sorted(folder.glob(f"qa{task}_*_{split}.txt"))), folder / f"qa{task}_*_{split}.txt")
    found: list[Story] = []
    words: list[str] = []
    answers: list[tuple[int, str]] = []
    for line in [*read_text(path, "stories of bAbI").splitlines(), "1 "]:
        number, _, rest = line.partition(" ")
        if number == "1" and answers:
            found.append(Story(task, tuple(words), tuple(answers)))
        if number == "1":
            words, answers = [], []
        said, _, answer = rest.partition("\t")
        words += WORD.findall(said.lower())
        if answer:
            answers.append((len(words) - 1, answer.split("\t")[0].lower()))
    return found


def batches(stories: list[Story], found: Stories, tokens: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Arrays (words, labels, tasks) of stories of like length, padded to one of few lengths.

    Args:
        stories: to put into batches.
        found: whose numbers of words and answers to use.
        tokens: words of a batch, padding included.

    Returns:
        words (B, T); labels (B, T), the answer at question marks, -1 elsewhere; tasks (B,). The last batch of a length
        is filled up with empty rows of task 0.
    """
    groups: dict[int, list[Story]] = {}
    for s in stories:
        groups.setdefault(max(32, 2 ** (len(s.words) - 1).bit_length()), []).append(s)
    made = []
    for length, group in sorted(groups.items()):
        rows = max(1, tokens // length)
        for at in range(0, len(group), rows):
            words, labels = np.zeros((rows, length), np.int64), np.full((rows, length), -1)
            tasks = np.zeros(rows, np.int64)
            for i, s in enumerate(group[at : at + rows]):
                words[i, : len(s.words)] = [found.words[w] for w in s.words]
                for where, answer in s.answers:
                    labels[i, where] = found.answers[answer]
                tasks[i] = s.task
            made.append((words, labels, tasks))
    return made


@torch.no_grad()
def wrong_answers(model: Any, answers: Any, found: Stories, tokens: int, device: str) -> dict[int, float]:
    """Share of wrong answers on the test stories of each task.

    Args:
        model: is put into evaluation mode.
        answers: words (B, T) -> logits (B, T, answers).
        found: the stories.
        tokens: words of a batch, padding included.
        device: device to run on.
    """
    model.eval()
    wrong, asked = np.zeros(21), np.zeros(21)
    for words, labels, tasks in batches(found.test, found, tokens):
        with training_step.autocast(device):
            guess = answers(torch.from_numpy(words).to(device)).argmax(-1).cpu().numpy()
        np.add.at(wrong, tasks, ((guess != labels) & (labels >= 0)).sum(1))
        np.add.at(asked, tasks, (labels >= 0).sum(1))
    return {t: float(wrong[t] / asked[t]) for t in range(1, 21) if asked[t]}
