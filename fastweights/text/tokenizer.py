"""Bytes to numbers and back. The last number of every vocabulary marks the start of a document."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.core import FastWeightError
from fastweights.files import write_text

FILE = "tokenizer.json"


class Bytes:
    """Every byte is a token; the start of a document is number 256.

    Examples:
        >>> tokens = Bytes().encode("hé".encode())
        >>> tokens.tolist(), Bytes().decode(tokens).decode()
        ([104, 195, 169], 'hé')
    """

    size = 257
    start = 256
    name = "bytes"
    exact = True  # a token stands for the same bytes wherever it is

    def encode(self, data: bytes) -> np.ndarray:
        """(T,) int64 tokens of data."""
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes that tokens stand for; a start of a document stands for none."""
        return bytes(t for t in tokens if t < 256)

    def lengths(self) -> np.ndarray:
        """Bytes per token."""
        return np.r_[np.ones(256, np.int64), 0]

    def save(self, folder: Path) -> None:
        """Nothing to save."""


class Subwords:
    """A tokenizer of the `tokenizers` library.

    Ours see each byte as the character of that number (Latin-1), so that any bytes, text or not, come back as they
    were. Others see UTF-8; bytes that are not become U+FFFD.

    Attributes:
        exact: whether a token stands for the same bytes wherever it is; `streams` decodes where it does not.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.start = tokenizer.get_vocab_size()
        self.size = self.start + 1
        alphabet = tokenizer.get_vocab()
        if (last := max(alphabet.values(), default=0)) >= max(1, self.start):  # memory is taken by the largest number
            raise FastWeightError(
                f"tokenizer: the largest of its {self.start} numbers is {last}; expected 0 to "
                f"{self.start - 1}, since the next one marks the start of a document"
            )
        self.latin = all(chr(b) in alphabet for b in range(256))
        self.letters = {} if self.latin else _byte_level(tokenizer, alphabet)
        self.exact = self.latin or bool(self.letters)
        added = tokenizer.get_added_tokens_decoder().items()
        self.added = {number: b"" if token.special else token.content.encode() for number, token in added}
        self.name = "bpe-" + hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:12]

    @classmethod
    def train(cls, size: int, texts: Iterable[bytes]) -> "Subwords":
        """A tokenizer of `size` tokens by byte-pair encoding: the pairs that are most frequent in texts become tokens.

        Words, numbers of up to three digits, runs of other signs, and a line break with the indentation after it are
        never merged with each other.
        """
        _need()
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        if size < 257:
            raise FastWeightError(f"tokenizer is 'bpe:{size}'; expected a size of at least 257: every byte and more")
        tokenizer = Tokenizer(models.BPE())
        some = "{1,256}"  # signs at most: training takes the square of a word's length, and some text has no blanks
        letters, signs = r"[A-Za-z_\x80-\xff]", r"[^\sA-Za-z_\x80-\xff\d]"
        words = Regex(rf" ?{letters}{some}| ?\d{{1,3}}| ?{signs}{some}|\n[ \t]{{0,256}}|\s{some}(?!\S)|\s")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=[chr(b) for b in range(256)], show_progress=False, special_tokens=[]
        )
        tokenizer.train_from_iterator((t.decode("latin-1") for t in texts), trainer)
        return cls(tokenizer)

    @classmethod
    def read(cls, path: Path) -> "Subwords":
        """The tokenizer in a file of the `tokenizers` library."""
        _need()
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_file(str(path)))
        except BaseException as error:  # the library raises plain Exception, and its panics are not even that
            if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
                raise
            raise FastWeightError(f"tokenizer {path} cannot be read: {error}; expected a file of tokenizers") from None

    def encode(self, data: bytes) -> np.ndarray:
        """(T,) int64 tokens of data."""
        text = data.decode("latin-1") if self.latin else data.decode("utf-8", "replace")
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """The bytes that tokens stand for; a start of a document stands for none."""
        known = [int(t) for t in tokens if t < self.start]
        if self.latin:
            return "".join(self.tokenizer.id_to_token(t) for t in known).encode("latin-1")
        if self.letters:
            return b"".join(self._spelled(t) for t in known)
        return self.tokenizer.decode(known).encode()

    def _spelled(self, token: int) -> bytes:
        """The bytes of a byte-level token; a special one has none."""
        if token in self.added:
            return self.added[token]
        return bytes(self.letters[letter] for letter in self.tokenizer.id_to_token(token))

    def lengths(self) -> np.ndarray:
        """Bytes per token of the vocabulary."""
        return np.array([len(self.decode([t])) for t in range(self.start)] + [0], np.int64)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a folder, where `load` finds it."""
        write_text(folder / FILE, self.tokenizer.to_str(pretty=True))


def _byte_level(tokenizer: Any, alphabet: Iterable[str]) -> dict[str, int]:
    """The byte that each letter of a byte-level tokenizer (as of GPT-2) stands for; empty for any other tokenizer."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return {}
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # characters that one can see stand for themselves
    hidden = [b for b in range(256) if b not in shown]
    letters = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return letters if all(set(word) <= letters.keys() for word in alphabet if word not in added) else {}


Tokenizer = Bytes | Subwords


def make(spec: str, texts: Iterable[bytes]) -> Tokenizer:
    """The tokenizer that `spec` stands for: "bytes", "bpe:SIZE", trained on texts, or a file of `tokenizers`."""
    if spec == "bytes":
        return Bytes()
    if spec.startswith("bpe:"):
        if not spec[4:].isdigit():
            raise FastWeightError(f"tokenizer is {spec!r}; expected bpe:SIZE, such as bpe:4096")
        return Subwords.train(int(spec[4:]), texts)
    if not Path(spec).is_file():
        raise FastWeightError(f"tokenizer is {spec!r}; expected bytes, bpe:SIZE or an existing tokenizer.json")
    return Subwords.read(Path(spec))


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a run or cache folder: the one in tokenizer.json, or bytes where there is none."""
    return Subwords.read(folder / FILE) if (folder / FILE).exists() else Bytes()


def _need() -> None:
    """Raise FastWeightError where the `tokenizers` library is not installed, with what to install."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise FastWeightError(
            "this tokenizer needs tokenizers, not installed; pip install 'fastweights[lm]', or use --tokenizer bytes"
        ) from None
