"""Words over a permutation group: a token is an element, the label the product of all elements so far.

Several copies of a small model train side by side, each with weights and words of its own. Letters: R copies, B words,
T tokens, D width, H heads, n writes per token.
"""

import itertools
import math

import torch
from torch import Tensor

POINTS = {"S3": 3, "S4": 4, "A5": 5, "S5": 5}  # how many points a group permutes; A: even permutations alone


def multiplication_table(group: str) -> Tensor:
    """(G, G): element a after element b, by their numbers; number 0 is the identity.

    Examples:
        >>> table = multiplication_table("S3")
        >>> table.shape, table[0].tolist()      # the identity after b is b
        (torch.Size([6, 6]), [0, 1, 2, 3, 4, 5])
        >>> len(multiplication_table("A5"))
        60
    """
    points = range(POINTS[group])
    even = lambda p: sum(p[i] > p[j] for i in points for j in range(i + 1, len(p))) % 2 == 0  # noqa: E731
    elements = [p for p in itertools.permutations(points) if group[0] == "S" or even(p)]
    number = {p: i for i, p in enumerate(elements)}
    return torch.tensor([[number[tuple(a[b[i]] for i in points)] for b in elements] for a in elements])


def words(table: Tensor, copies: int, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and products (R, B, length). The first token, G, starts every word; the others are elements 0 .. G - 1.

    Products of all prefixes are made by doubling, in log2(length) look-ups instead of one per token: multiplication in
    a group is associative.

    Args:
        table: of `multiplication_table`.
        copies, batch: R and B.
        length: tokens of a word, the start included.
        generator: of random numbers, on the table's device.

        >>> tokens, products = words(multiplication_table("S3"), 1, 2, 5, torch.Generator().manual_seed(0))
        >>> tokens.shape, tokens[..., 0].tolist(), products[..., 0].tolist()
        (torch.Size([1, 2, 5]), [[6, 6]], [[0, 0]])
    """
    size = len(table)
    tokens = torch.randint(size, (copies, batch, length), generator=generator, device=table.device)
    tokens[..., 0] = 0
    products, step = tokens, 1
    while step < length:  # products of 2, 4, 8, ... neighbours
        later = table[products[..., step:], products[..., :-step]]
        products, step = torch.cat([products[..., :step], later], -1), 2 * step
    tokens = tokens.clone()
    tokens[..., 0] = size
    return tokens, products


class Course:
    """Which tokens of a word count, by copy: the first 2 at first, half as many more whenever a copy has learned those.

    A copy has learned them when its loss is nearer to the least that smoothed labels allow than to chance, by far.
    """

    def __init__(self, copies: int, elements: int, smoothing: float, device: str):
        right, wrong = 1 - smoothing + smoothing / elements, smoothing / elements
        least = -right * math.log(right) - (elements - 1) * wrong * math.log(wrong)
        self.good = least + 0.15 * (math.log(elements) - least)
        self.counts = torch.full((copies,), 2, device=device)

    def counted(self, length: int, all_of_them: bool = False) -> Tensor:
        """(R, length) of 0 and 1; the token that starts a word does not count.

        Args:
            length: tokens of the words of this step.
            all_of_them: count every token, whatever was learned.
        """
        place = torch.arange(length, device=self.counts.device)
        return ((place > 0) & (all_of_them | (place <= self.counts[:, None]))).float()

    def learn(self, found: Tensor, length: int) -> None:
        """Go on to longer words, of at most `length`, with the copies whose loss is good; nothing waits for a GPU."""
        longer = (self.counts + (self.counts // 2).clamp(min=1)).clamp(max=length)
        self.counts = torch.where(found < self.good, longer, self.counts)
