"""Pairs of a key and a value, each asked for later in the same sequence (multi-query associative recall)."""

import torch
from torch import Tensor

from fastweights.lab.engine.training_step import autocast
from fastweights.models.language_model import LanguageModel

TESTED, BATCH = 1024, 256  # sequences for each number of pairs, and of them read at a time


def sequences(rows: int, pairs: Tensor, most: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and labels (rows, 4 * most) of random sequences; a label is -1 where nothing is asked.

    The first half of a row has its pairs, k1 v1 k2 v2 ...; in the second half each key comes back once, in random order
    and at a random even place, and the label there is its value. Other places hold token 0. Keys are tokens from 1 to
    vocab / 2 - 1, different within a row; values are tokens from vocab / 2 to vocab - 1.

    Args:
        rows: number of sequences.
        pairs: (rows,), how many pairs each sequence has.
        most: how many pairs any sequence may have, which decides the length.
        vocab: number of tokens, keys and values together.
        generator: of random numbers, on the device of `pairs`.
    """
    device, half = pairs.device, vocab // 2

    def random(count: int) -> Tensor:
        return torch.rand(rows, count, generator=generator, device=device)

    keys = 1 + random(half - 1).argsort(1)[:, :most]
    values = half + (random(most) * half).long()
    used = torch.arange(most, device=device) < pairs[:, None]  # (rows, most): whether there is such a pair
    stored = torch.stack([keys, values], 2).where(used[..., None], 0).flatten(1)
    slots = random(most).argsort(1)  # each key has a slot of two tokens, so all fit however many pairs there are
    repeated = torch.zeros_like(stored)
    labels = torch.full_like(stored, -1)
    repeated.scatter_(1, 2 * slots, keys.where(used, 0))
    labels.scatter_(1, 2 * slots, values.where(used, -1))
    return torch.cat([stored, repeated], 1), torch.cat([torch.full_like(stored, -1), labels], 1)


def question_places(tokens: Tensor) -> slice:
    """The places in sequences (B, T) at which a key may be asked for: the even ones of the second half."""
    return slice(tokens.shape[1] // 2, None, 2)


def pair_counts(most: int) -> list[int]:
    """Numbers of pairs that are trained and tested: powers of two from 4 to `most`.

    Examples:
        >>> pair_counts(64)
        [4, 8, 16, 32, 64]
    """
    return [2**i for i in range(2, most.bit_length())]


def answer_logits(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Logits (B, n, V) of the answers at the n `question_places` of tokens (B, T)."""
    features, _ = model(tokens)
    return features[:, question_places(tokens)] @ model.embedding.weight.mT


@torch.no_grad()
def accuracy(model: LanguageModel, pairs: int, most: int, vocab: int, generator: torch.Generator, device: str) -> float:
    """The share of keys whose value is the likeliest token.

    Args:
        model: is put into evaluation mode.
        pairs: in each sequence.
        most: pairs that a sequence may have, which decides its length.
        vocab: number of tokens.
        generator: of the sequences.
        device: "cpu" or "cuda".
    """
    model.eval()
    right = questions = 0.0
    for _ in range(TESTED // BATCH):
        tokens, labels = sequences(BATCH, torch.full((BATCH,), pairs, device=device), most, vocab, generator)
        labels = labels[:, question_places(labels)]
        with autocast(device):
            answers = answer_logits(model, tokens).argmax(-1)
        right += float((answers == labels).sum())
        questions += float((labels >= 0).sum())
    return right / questions


def state_size(model: LanguageModel) -> int:
    """How many numbers the memories carry from token to token; softmax's grow with the sequence and count as 0."""
    states = [block.mixer.init_state(1) for block in model.blocks]
    return sum(state.memory.numel() for state in states if state is not None)
