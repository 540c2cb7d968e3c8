"""Words over a permutation group: a token is an element of the group, its label the product of all elements so far.

Shapes: R copies of a model, each with words of its own, B words, T tokens, G elements of the group.
"""

import itertools
import math

import torch
from torch import Tensor

POINTS = {"S3": 3, "S4": 4, "A5": 5, "S5": 5}  # how many points a group permutes; A: even permutations alone


def multiplication_table(group: str) -> Tensor:
    """(G, G): entry [a, b] is the number of the element that does b first and then a; number 0 is the identity.

    Examples:
        >>> table = multiplication_table("S3")
        >>> table.shape, table[0].tolist()      # the identity after b is b
        (torch.Size([6, 6]), [0, 1, 2, 3, 4, 5])
        >>> len(multiplication_table("A5"))
        60
    """
    points = range(POINTS[group])
    elements = [p for p in itertools.permutations(points) if group.startswith("S") or _is_even(p)]
    number = {p: i for i, p in enumerate(elements)}
    return torch.tensor([[number[tuple(a[b[i]] for i in points)] for b in elements] for a in elements])


def _is_even(permutation: tuple[int, ...]) -> bool:
    """Whether a permutation is a product of an even number of swaps.

    Examples:
        >>> _is_even((1, 0, 2)), _is_even((1, 2, 0))
        (False, True)
    """
    inversions = sum(a > b for a, b in itertools.combinations(permutation, 2))
    return inversions % 2 == 0


def words(table: Tensor, copies: int, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens and their products, (R, B, T) each.

    The first token of every word is a start token, number G, whose product is the identity; the others are elements
    0 .. G - 1. The products of all beginnings of a word are a prefix scan: since multiplication is associative, those
    of 2, 4, 8, ... neighbours are looked up in turn, log2(T) times in place of once for each token.

    Args:
        table: of `multiplication_table`.
        copies: R.
        batch: B, words of each copy.
        length: T, the start token included.
        generator: of random numbers, on the device of the table.

    Examples:
        >>> tokens, products = words(multiplication_table("S3"), 1, 2, 5, torch.Generator().manual_seed(0))
        >>> tokens.shape, tokens[..., 0].tolist(), products[..., 0].tolist()
        (torch.Size([1, 2, 5]), [[6, 6]], [[0, 0]])
    """
    size = len(table)
    tokens = torch.randint(size, (copies, batch, length), generator=generator, device=table.device)
    tokens[..., 0] = 0
    products, span = tokens, 1  # products of up to `span` neighbours
    while span < length:
        combined = table[products[..., span:], products[..., :-span]]
        products, span = torch.cat([products[..., :span], combined], -1), 2 * span
    tokens = tokens.clone()
    tokens[..., 0] = size
    return tokens, products


class Curriculum:
    """How many tokens of a word count in the loss of each copy: 2 at first, half as many more when these are learned.

    They are learned when the loss is close to the least that smoothed labels allow: within 15 % of the way to chance.

    Args:
        copies: R.
        elements: G.
        smoothing: of the labels.
        device: "cpu" or "cuda".
    """

    def __init__(self, copies: int, elements: int, smoothing: float, device: str):
        right, wrong = 1 - smoothing + smoothing / elements, smoothing / elements  # smoothed labels
        least = -right * math.log(right) - (elements - 1) * wrong * math.log(wrong)
        self.learned_below = least + 0.15 * (math.log(elements) - least)
        self.counts = torch.full((copies,), 2, device=device)  # tokens that count, the start token aside

    def mask(self, length: int, everything: bool = False) -> Tensor:
        """1 for the tokens that count and 0 for the others, (R, T); the start token never counts.

        Args:
            length: T, tokens of the words of this step.
            everything: whether all tokens count, whatever was learned.
        """
        position = torch.arange(length, device=self.counts.device)
        return ((position > 0) & (everything | (position <= self.counts[:, None]))).float()

    def update(self, losses: Tensor, most: int) -> None:
        """Count more tokens for the copies that have learned theirs. Nothing here waits for a GPU.

        Args:
            losses: (R,), of the tokens that counted.
            most: tokens that may count.
        """
        more = (self.counts + (self.counts // 2).clamp(min=1)).clamp(max=most)
        self.counts = torch.where(losses < self.learned_below, more, self.counts)
