"""Stories with questions: bAbI's twenty tasks as words and answers, batches of them, and the share of wrong answers.

A story is one sequence of words, with its questions where they are asked. The answer is predicted at the question mark
and never stands in the text. Several words, as in "milk,football", are one answer.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fastweights.core import FastWeightError
from fastweights.files import read_text
from fastweights.lab.engine.training_step import autocast

TASKS = (
    "single fact", "two facts", "three facts", "two relations", "three relations", "yes or no", "counting", "lists",
    "negation", "indefinite", "coreference", "conjunction", "compound coreference", "time", "deduction", "induction",
    "positions", "sizes", "paths", "motivations",
)  # fmt: skip
WORD = re.compile(r"[\w']+|[.?]")


@dataclass(frozen=True)
class Story:
    """One story.

    Attributes:
        task: number of the task that it belongs to, from 1.
        words: of the story and of its questions.
        answers: for each question, the index of its question mark in `words`, and the answer.
    """

    task: int
    words: tuple[str, ...]
    answers: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Stories:
    """Stories to train and test on, and their vocabularies.

    Attributes:
        name: of the source.
        train, test: stories.
        word_numbers: number of each word, from 1; 0 is padding.
        answer_numbers: number of each answer, from 0.
    """

    name: str
    train: list[Story]
    test: list[Story]
    word_numbers: dict[str, int]
    answer_numbers: dict[str, int]


@functools.lru_cache(2)
def load(data: Path | None, limit: int = 0) -> Stories:
    """The twenty tasks of bAbI.

    Args:
        data: folder of the user's files, which has them in babi/en/.
        limit: number of stories of each task that are kept, for training and for the test; 0 keeps all.
    """
    if data is None or not (data / "babi" / "en").is_dir():
        raise FastWeightError(f"data is {data}; expected a folder with babi/en/qa1_..._train.txt and so on")
    splits: dict[str, list[Story]] = dict(train=[], test=[])
    for split, stories in splits.items():
        for task in range(1, len(TASKS) + 1):
            stories += _read(data / "babi" / "en", task, split)[: limit or None]
    return to_stories("babi", **splits)


def to_stories(name: str, train: list[Story], test: list[Story]) -> Stories:
    """Number the words and answers of stories, in alphabetical order."""
    words = sorted({word for story in train + test for word in story.words})
    answers = sorted({answer for story in train + test for _, answer in story.answers})
    word_numbers = {word: i + 1 for i, word in enumerate(words)}
    return Stories(name, train, test, word_numbers, {answer: i for i, answer in enumerate(answers)})


def _read(folder: Path, task: int, split: str) -> list[Story]:
    """The stories in the file of a task: a line numbered 1 starts a story, a tab comes before an answer.

    Args:
        folder: of the corpus.
        task: its number, from 1 to 20.
        split: "train" or "test".
    """
    pattern = f"qa{task}_*_{split}.txt"
    path = next(iter(sorted(folder.glob(pattern))), folder / pattern)
    stories: list[Story] = []
    words: list[str] = []
    answers: list[tuple[int, str]] = []
    for line in [*read_text(path, "stories of bAbI").splitlines(), "1 "]:  # the last line ends the last story
        number, _, rest = line.partition(" ")
        if number == "1":
            if answers:
                stories.append(Story(task, tuple(words), tuple(answers)))
            words, answers = [], []
        sentence, _, answer = rest.partition("\t")
        words += WORD.findall(sentence.lower())
        if answer:
            answers.append((len(words) - 1, answer.split("\t")[0].lower()))
    return stories


def batches(
    stories: list[Story], vocabularies: Stories, tokens: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Batches of stories of similar length, padded to 32, 64, 128 ... words.

    Args:
        stories: to put into batches.
        vocabularies: the stories whose numbers of words and answers are used.
        tokens: number of words in a batch, padding included.

    Returns:
        For each batch: words (B, T); labels (B, T), the answer at question marks and -1 elsewhere; tasks (B,). The last
        batch of a length is filled up with empty rows of task 0.
    """
    by_length: dict[int, list[Story]] = {}
    for story in stories:
        by_length.setdefault(max(32, 2 ** (len(story.words) - 1).bit_length()), []).append(story)
    result = []
    for length, group in sorted(by_length.items()):
        rows = max(1, tokens // length)
        for start in range(0, len(group), rows):
            words, labels = np.zeros((rows, length), np.int64), np.full((rows, length), -1)
            tasks = np.zeros(rows, np.int64)
            for i, story in enumerate(group[start : start + rows]):
                words[i, : len(story.words)] = [vocabularies.word_numbers[word] for word in story.words]
                for position, answer in story.answers:
                    labels[i, position] = vocabularies.answer_numbers[answer]
                tasks[i] = story.task
            result.append((words, labels, tasks))
    return result


@torch.no_grad()
def wrong_answers(
    model: nn.Module, answer_logits: Callable[[Tensor], Tensor], stories: Stories, tokens: int, device: str
) -> dict[int, float]:
    """The share of wrong answers on the test stories, by the number of the task.

    Args:
        model: is put into evaluation mode.
        answer_logits: from words (B, T) to the model's logits (B, T, answers).
        stories: whose test stories are asked.
        tokens: number of words in a batch, padding included.
        device: "cpu" or "cuda".
    """
    model.eval()
    wrong, questions = np.zeros(len(TASKS) + 1), np.zeros(len(TASKS) + 1)  # by task; 0 is padding
    for words, labels, tasks in batches(stories.test, stories, tokens):
        with autocast(device):
            answers = answer_logits(torch.from_numpy(words).to(device)).argmax(-1).cpu().numpy()
        np.add.at(wrong, tasks, ((answers != labels) & (labels >= 0)).sum(1))
        np.add.at(questions, tasks, (labels >= 0).sum(1))
    return {task: float(wrong[task] / questions[task]) for task in range(1, len(TASKS) + 1) if questions[task]}
