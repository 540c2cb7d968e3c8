"""Text of tokens that come one after the other: the bytes that each adds to those before it.

Our own tokenizers and byte-level ones (as of GPT-2) give each token bytes of its own. In others a token's text depends
on its neighbours: a piece with a mark for the blank before it loses that blank at the start of a text (Llama), and a
piece that continues a word is marked where it stands alone (BERT). There the tokens before are decoded with it.
"""

from collections.abc import Iterable

import numpy as np

from fastweights.text.tokenizer import Tokenizer

UNKNOWN = "\ufffd".encode()  # what bytes that are no character are decoded to
HELD = 8  # tokens after which bytes that are no character are given as they are


class Stream:
    """The bytes that each token adds.

        >>> from fastweights.text.tokenizer import Bytes
        >>> stream = Stream(Bytes())
        >>> [stream.add(token) for token in b"hi"], stream.rest()
        ([b'h', b'i'], b'')

    Args:
        tokenizer: of the model.
        before: tokens that came before, the last ones are enough; nothing of them is given. Those that end a character
            which began earlier are of no use.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()):
        self.tokenizer = tokenizer
        self.tokens = [int(token) for token in before][-HELD:]  # those that were given last, and those that wait
        while not tokenizer.exact and UNKNOWN in tokenizer.decode(self.tokens):
            self.tokens.pop(0)
        self.given = len(self.tokens)

    def add(self, token: int) -> bytes:
        """What this token adds; nothing where it ends within a character, whose bytes then come with a later one."""
        if self.tokenizer.exact:
            return self.tokenizer.decode([token])
        self.tokens.append(token)
        text, new = self._new()
        if text.endswith(UNKNOWN) and len(self.tokens) - self.given < HELD:
            return b""
        self.tokens, self.given = self.tokens[self.given :], len(self.tokens) - self.given
        return new

    def rest(self) -> bytes:
        """What waits at the end of the tokens."""
        return b"" if self.tokenizer.exact else self._new()[1]

    def _new(self) -> tuple[bytes, bytes]:
        """The text of the tokens that are known here, and what those that wait add to it."""
        known, text = self.tokenizer.decode(self.tokens[: self.given]), self.tokenizer.decode(self.tokens)
        return text, text[len(known) :]


def sizes(tokenizer: Tokenizer, tokens: Iterable[int]) -> np.ndarray | None:
    """Bytes that each token of a text adds (T,), or None where `tokenizer.lengths` says so for each token by itself."""
    if tokenizer.exact:
        return None
    stream = Stream(tokenizer)
    return np.array([len(stream.add(int(token))) for token in tokens], np.int64)
