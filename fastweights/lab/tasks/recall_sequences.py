"""Pairs of a key and a value, asked for later in the same sequence (multi-query associative recall)."""

from typing import Any

import torch
from torch import Tensor

from fastweights.lab.engine import training_step

TESTED = 1024  # sequences per number of pairs


def sequences(rows: int, pairs: Tensor, most: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """tokens and labels (rows, 4 * most); label -1 where nothing is asked.

    A row starts with its pairs[row] key-value pairs, k1 v1 k2 v2 ...; then the keys come back, each once, in random
    order and at random even places, and the label there is its value. Other places after the pairs hold token 0.
    Keys are 1 .. vocab / 2 - 1, different within a row; values are vocab / 2 .. vocab - 1.

    Args:
        rows: sequences.
        pairs: (rows,) how many each has.
        most: how many any of them may have, which decides the length.
        vocab: keys and values together.
        generator: source of chance, on the device of the result.
    """
    device, half = pairs.device, vocab // 2
    draw = lambda n: torch.rand(rows, n, generator=generator, device=device)  # noqa: E731
    keys = 1 + draw(half - 1).argsort(1)[:, :most]
    values = half + (draw(most) * half).long()
    number = torch.arange(most, device=device)
    there = number < pairs[:, None]
    first = torch.stack([keys, values], 2).where(there[..., None], 0).flatten(1)  # (rows, 2 most)
    place = draw(most).argsort(1)  # slot of two tokens after the pairs, one per key: all keys fit whatever `pairs` is
    second = torch.zeros_like(first)
    labels = torch.full_like(first, -1)
    second.scatter_(1, 2 * place, keys.where(there, 0))
    labels.scatter_(1, 2 * place, values.where(there, -1))
    return torch.cat([first, second], 1), torch.cat([torch.full_like(first, -1), labels], 1)


def counts(most: int) -> list[int]:
    """Numbers of pairs that are trained and tested: powers of two."""
    return [2**i for i in range(2, most.bit_length()) if 2**i <= most]


def answers(model: Any, tokens: Tensor) -> Tensor:
    """Logits (B, n, V) at the n places where a key may be asked for."""
    return model(tokens)[0][:, tokens.shape[1] // 2 :: 2] @ model.embedding.weight.mT


@torch.no_grad()
def accuracy(model: Any, n: int, most: int, vocab: int, generator: torch.Generator, device: str) -> float:
    """Share of keys whose value is the likeliest token, in sequences of n pairs.

    Args:
        model: tokens (B, T) -> logits.
        n: pairs in a sequence.
        most: pairs that a sequence may have, which decides its length.
        vocab: number of tokens.
        generator: of the sequences.
        device: device to run on.
    """
    model.eval()
    right = asked = 0.0
    for _ in range(max(1, TESTED // 256)):
        tokens, labels = sequences(256, torch.full((256,), n, device=device), most, vocab, generator)
        labels = labels[:, labels.shape[1] // 2 :: 2]
        with training_step.autocast(device):
            guess = answers(model, tokens).argmax(-1)
        right, asked = right + float((guess == labels).sum()), asked + float((labels >= 0).sum())
    return right / asked


def state_size(model: Any) -> int:
    """Numbers carried from token to token; softmax's grow with the sequence and count as 0."""
    states = [block.mixer.init_state(1) for block in model.blocks]
    return sum(s.memory.numel() for s in states if s is not None)
