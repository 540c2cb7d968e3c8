"""The text as pages of tokens: the stages `prepare` and `words`, and the pages as the other stages read them.

Every function of this folder that takes `args` means the arguments of the command line (__main__.py).
"""

import re
from collections import Counter
from itertools import pairwise

import numpy as np

from fastweights.text.tokenizer import FILE, Subwords

ENCODED = 512  # pages that are encoded at once: an encoding takes a hundred times the memory of its tokens
STARTING = 0.25  # share of the windows of `windows` that start where a page does
FILE_OF_PAGES = "pages.npz"


def prepare(args):
    """Write pages.npz of a text that is split at `<page>`, encoded by a tokenizer that is trained on it.

    A share of the pages, drawn at random, is held out of all training.
    """
    if (args.work / FILE_OF_PAGES).exists():
        return
    args.work.mkdir(parents=True, exist_ok=True)
    text = args.text.read_bytes()[: args.bytes or None]
    pages = [b"<page>" + page for page in text.split(b"<page>")[1:]]
    held_out = np.random.default_rng(0).random(len(pages)) < args.held_out
    if (args.work / FILE).exists():
        tokenizer = Subwords.read(args.work / FILE)
    else:
        training = (page for page, held in zip(pages, held_out, strict=True) if not held)
        tokenizer = Subwords.train(args.vocab, training)
        tokenizer.save(args.work)
    tokens = []
    for start in range(0, len(pages), ENCODED):
        texts = [page.decode("latin-1") for page in pages[start : start + ENCODED]]
        encoded = tokenizer.tokenizer.encode_batch(texts, add_special_tokens=False)
        tokens += [np.array([tokenizer.start, *page.ids], np.uint16) for page in encoded]
    _save(args, tokens, held_out, tokenizer.lengths())
    print(f"{len(pages)} pages, {sum(map(len, tokens)):,} tokens, {int(held_out.sum())} pages held out")


def words(args):
    """Write pages.npz of WikiText in the folder --text: articles as words and line ends, valid and test held out."""
    if (args.work / FILE_OF_PAGES).exists():
        return
    args.work.mkdir(parents=True, exist_ok=True)
    articles, held_out = [], []
    for part in ("train", "valid", "test"):
        lines = (args.text / f"wiki.{part}.tokens").read_text().splitlines()
        titles = [i for i, line in enumerate(lines) if re.fullmatch(r" = [^=].* = ", line)]
        for start, end in pairwise([*titles, len(lines)]):
            articles.append([word for line in lines[start:end] if line.strip() for word in [*line.split(), "\n"]])
            held_out.append(part != "train")
    known = Counter(word for article, held in zip(articles, held_out, strict=True) if not held for word in article)
    number = {word: i for i, word in enumerate(known)}
    unknown, start = number["<unk>"], len(number)
    tokens = [np.array([start, *(number.get(word, unknown) for word in article)], np.uint16) for article in articles]
    sizes = [*(len(word.encode()) + (word != "\n") for word in number), 0]  # of a word and the space before it
    _save(args, tokens, np.array(held_out), np.array(sizes))
    total = sum(map(len, tokens))
    print(f"{len(tokens)} articles, {total:,} words of {start:,} kinds, {sum(held_out)} articles held out")


def _save(args, tokens, held_out, sizes):
    """Write pages.npz.

    Args:
        args: of the command line.
        tokens: of each page, with the start token.
        held_out: (pages,), whether a page is held out.
        sizes: (vocab,), bytes of each token.
    """
    edges = np.cumsum([0, *map(len, tokens)])
    np.savez_compressed(args.work / FILE_OF_PAGES, tokens=np.concatenate(tokens), at=edges, test=held_out, bytes=sizes)


class Pages:
    """The pages of a text.

    Attributes:
        tokens: of all pages, end to end, each page after its start token.
        edges: (pages + 1,), where in `tokens` each page begins.
        lengths: (pages,), tokens of each page, the start token aside.
        bytes: (vocab,), bytes of each token.
        train: numbers of the pages to train on.
        valid, test: numbers of pages to choose rates on, and of pages to score; both of at least --least tokens.
    """

    def __init__(self, args):
        arrays = np.load(args.work / FILE_OF_PAGES)
        self.tokens, self.edges, self.bytes = arrays["tokens"], arrays["at"], arrays["bytes"]
        self.vocab = len(self.bytes)
        self.lengths, self.most = np.diff(self.edges) - 1, args.most
        held_out = np.flatnonzero(arrays["test"] & (self.lengths >= args.least))
        order = np.random.default_rng(1).permutation(held_out)
        self.valid, self.test = order[: args.valid], np.sort(order[args.valid :][: args.pages])
        self.train = np.flatnonzero(~arrays["test"])

    def page(self, i, most=None):
        """(T + 1,): the start token of page i and the page's tokens, `most` or --most of them."""
        return self.tokens[self.edges[i] : self.edges[i + 1]][: 1 + (most or self.most)].astype(np.int64)

    def windows_inside(self, rng, rows, length, least=None):
        """Windows (rows, length + 1) of training pages, each inside one page; all pages are equally likely.

        Args:
            rng: source of random numbers.
            rows: number of windows.
            length: tokens of a window.
            least: tokens of the shortest page; `length` when absent.
        """
        pages = rng.choice(self._long_enough(least or length), rows)
        starts = [rng.integers(self.edges[i], self.edges[i + 1] - length) for i in pages]
        return self._cut(starts, length)

    def windows(self, rng, rows, length):
        """The same with all tokens equally likely; a quarter of the windows start where a page does."""
        long = self._long_enough(length)
        share = self.lengths[long] / self.lengths[long].sum()
        pages, at_start = rng.choice(long, rows, p=share), rng.random(rows) < STARTING
        last = self.edges[pages + 1] - length
        starts = np.where(at_start, self.edges[pages], rng.integers(self.edges[pages], last))
        return self._cut(starts, length)

    def _long_enough(self, length):
        """Numbers of the training pages of at least so many tokens."""
        return self.train[self.lengths[self.train] >= length]

    def _cut(self, starts, length):
        """Windows (rows, length + 1) from these positions in `tokens` on."""
        return np.stack([self.tokens[start : start + length + 1] for start in starts]).astype(np.int64)
