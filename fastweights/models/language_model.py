"""The language model: one trunk for every mixer, two heads, and a state that goes in and comes out.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastweights.core import FastWeightError
from fastweights.fwl_config import FWLState
from fastweights.models.blocks import EPS, Block, Norm
from fastweights.models.config import Config
from fastweights.models.documents import Documents
from fastweights.models.memory import Memory
from fastweights.models.mixers import look
from fastweights.refresh import RefreshState
from fastweights.torch import cross_entropy
from fastweights.torch.dtypes import autocast_dtype
from fastweights.torch.fwl import FWLBlock
from fastweights.torch.learning import training_loss
from fastweights.torch.tree import map_tensors

SEGMENT, LONG_SEGMENT = 1024, 16_384  # tokens of a text that are read at once


class State(NamedTuple):
    """What a model remembers: a state per block, and what its Fast Weight Layer has learned, if it has one."""

    blocks: list
    fast: FWLState | RefreshState | None


class Scores(NamedTuple):
    """What `LanguageModel.score` returns.

    Attributes:
        loss: (B, T) per token, in nats.
        slow: (B, T), that of a Fast Weight Layer which has learned nothing from the text; None without such a layer.
        state: after the last token.
    """

    loss: Tensor
    slow: Tensor | None
    state: State


class LanguageModel(nn.Module):
    """A language model of tokens: embedding, blocks, norm, and the embedding again for the output.

    What the blocks are, and whether the output is a Fast Weight Layer, the configuration says.

        >>> model = LanguageModel(Config(dim=16, heads=2, depth=1), vocab=257)
        >>> scores = model.score(torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long))
        >>> scores.loss.shape
        torch.Size([1, 8])
        >>> again = model.score(torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long), scores.state)

    `tokenizer` is set by `load`; with it `read` takes bytes.

    Args:
        config: a `Config`.
        vocab: number of tokens; the last of them marks the start of a document.
        device, dtype: of the parameters.
    """

    embedding: Any
    blocks: Any
    fast: Any

    def __init__(self, config: Config, vocab: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        self.config, self.vocab = config, vocab
        self.tokenizer: Any = None
        self._fingerprint: tuple[list[Any], str] | None = None  # and what the weights looked like then
        self.compiled: Any = None  # how `fastweights.models.compiled` runs a block in training
        to = dict(device=device, dtype=dtype)
        self.embedding = nn.Embedding(vocab, config.dim, **to)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        self.blocks = nn.ModuleList(Block(config, name, **to) for name in config.mixers)
        self.norm = Norm(config.dim, EPS, **to)
        self.fast = None
        if config.head == "fwl":
            hidden = config.fast_hidden or 2 * config.dim
            self.fast = FWLBlock(
                config.dim,
                vocab,
                inputs=config.dim,
                hidden=hidden,
                unembed=self.embedding.weight,
                **config.fast_options,
                **to,
            )

    def init_state(self, batch: int) -> State:
        """The state before the first token."""
        blocks = [block.mixer.init_state(batch) for block in self.blocks]
        return State(blocks, None if self.fast is None else self.fast.init_state(batch))

    def forward(
        self, tokens: Tensor, state: State | None = None, documents: Documents | None = None
    ) -> tuple[Tensor, list]:
        """Features (B, T, D) for tokens (B, T), and the states of the blocks.

        Args:
            tokens: (B, T).
            state: of an earlier call; empty when absent.
            documents: where documents start inside the rows, if they do.
        """
        blocks = [None] * len(self.blocks) if state is None else state.blocks
        x, after = self.embedding(tokens), []
        recompute = self.config.checkpointing and self.training
        call: Any = partial(checkpoint, use_reentrant=False) if recompute else lambda run, *given: run(*given)
        even = None if documents is None or self.compiled is None else documents.even
        more = None
        if even is not None:  # what a feed-forward layer adds, the next block adds, in the pass that reads it
            more = torch.zeros_like(x, dtype=autocast_dtype(x), requires_grad=x.requires_grad)
            even = even._replace(seen=look(self.blocks, blocks, even))
        for block, memory in zip(self.blocks, blocks, strict=True):
            if even is None:
                x, memory = call(Block.__call__, block, x, memory, documents)
            else:
                x, more, memory = call(self.compiled, block, x, more, memory, even)
            after.append(memory)
        x = x if even is None else x + more
        return self.norm(x), after

    def score(
        self,
        tokens: Tensor,
        labels: Tensor,
        state: State | None = None,
        *,
        weights: Tensor | None = None,
        documents: Documents | None = None,
        learn: bool = True,
        slow: bool = True,
    ) -> Scores:
        """The loss of each label (B, T) given the tokens (B, T) up to it.

        Args:
            tokens, labels: (B, T); labels are usually the tokens one later.
            state: of an earlier call, to go on with the same texts; empty when absent.
            weights: (B, T), 0 where a Fast Weight Layer shall not learn from the label.
            documents: where documents start inside the rows, if they do.
            learn: whether a Fast Weight Layer learns from the labels.
            slow: whether to compute the loss of its trained weights alone as well.
        """
        state = self.init_state(len(tokens)) if state is None else state
        x, blocks = self(tokens, state, documents)
        return self._scored(x, blocks, labels, state, weights, documents, learn, slow)

    def _scored(self, x, blocks, labels, state, weights, documents, learn, slow):
        """`score`, once the blocks have made features x of the tokens."""
        if self.fast is None:
            zero = x.new_zeros(self.vocab)
            return Scores(cross_entropy.loss(x, self.embedding.weight.mT, zero, labels), None, State(blocks, None))
        if not learn:
            loss = self.fast.slow_loss(x, labels)
            return Scores(loss, loss, State(blocks, state.fast))
        weights = torch.ones(labels.shape, device=x.device) if weights is None else weights
        out = self._learn(x, labels, weights, state.fast, documents, slow)
        return Scores(out.loss, out.slow_loss, State(blocks, out.state))

    def train_loss(
        self, tokens: Tensor, labels: Tensor, weights: Tensor, state: State, documents: Documents, slow_share: float
    ) -> tuple[Tensor, Tensor, State]:
        """What training minimises, the weighted sum of losses without gradient, and the state after the tokens.

        Args:
            tokens, labels, weights: (B, T).
            state: of an earlier call.
            documents: where documents start inside the rows.
            slow_share: how much the loss of a Fast Weight Layer that has learned nothing counts in what is minimised.
        """
        x, blocks = self(tokens, state, documents)
        if self.fast is None and torch.is_grad_enabled():
            value = cross_entropy.summed(x, self.embedding.weight.mT, x.new_zeros(self.vocab), labels, weights)
            return value, value.detach(), State(blocks, None)
        fast: Any = state.fast
        if self.fast is not None and not training_loss.refuses(
            self.fast.config, x, weights, fast, packed=not documents.whole
        ):
            found = training_loss.objective(
                self.fast.config,
                self.fast._weights(),
                x,
                labels,
                weights,
                fast,
                starts=documents.starts,
                keep=documents.keep,
                documents=documents.most,
                slow_share=slow_share,
            )
            return found.value, (found.loss * weights).sum(), State(blocks, found.state)
        scores = self._scored(x, blocks, labels, state, weights, documents, True, True)
        loss = value = (scores.loss * weights).sum()
        if scores.slow is not None:
            value = loss * (1 - slow_share) + slow_share * (scores.slow * weights).sum()
            value = value + 0.0 * self.fast.steps.sum()  # DDP waits for it, also where no chunk has ended
        return value, loss.detach(), scores.state

    def _learn(self, x, labels, weights, fast, documents, slow):
        """The Fast Weight Layer on features x: rows that hold several documents are laid end to end, as packed ones.

        Args:
            x: (B, T, D) features.
            labels, weights: (B, T).
            fast: state of the layer.
            documents: where documents start inside the rows.
            slow: whether the loss of the trained weights is wanted too.
        """
        if documents is None or documents.whole:
            fast = fast if documents is None else map_tensors(documents.kept, fast)
            return self.fast.run(x, labels, weights, fast, logits=False, slow=slow)
        out = self.fast.run(
            x.reshape(1, -1, x.shape[-1]),
            labels.reshape(1, -1),
            weights.reshape(1, -1),
            map_tensors(documents.enter, fast),
            cu_seqlens=documents.cu_seqlens,
            logits=False,
            slow=slow,
        )
        of_slow = None if out.slow_loss is None else out.slow_loss.view(labels.shape)
        return out._replace(
            loss=out.loss.view(labels.shape), slow_loss=of_slow, state=map_tensors(documents.leave, out.state)
        )

    def logits(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits (B, T, V) and the state; a Fast Weight Layer learns nothing."""
        x, blocks = self(tokens, state)
        logits = x @ self.embedding.weight.mT if self.fast is None else self.fast.slow_logits(x)
        return logits, State(blocks, None if state is None else state.fast)

    @torch.no_grad()
    def step(
        self, token: Tensor, state: State, *, learn: bool = True, full: bool | None = None
    ) -> tuple[Tensor, State]:
        """Logits (B, V) for what follows token (B,), and the state: constant work, unless a block is softmax.

        A Fast Weight Layer learns that this token followed the one before; learn=False leaves it as it is, with what
        it has learned so far.
        full: where the caller knows it, whether a whole chunk of tokens waits to be learned by a refreshed layer; it
            saves looking the number up on the device.
        """
        x, blocks = self(token[:, None], state)
        if self.fast is None:
            return (x @ self.embedding.weight.mT)[:, 0], State(blocks, None)
        if not learn:
            logits, fast = self._answer(x[:, 0], state.fast, full)
            return logits, State(blocks, fast)
        if full is None:
            logits, fast = self.fast.step(x[:, 0], token, state.fast)  # token is the label that was waited for
        else:
            logits, fast = self.fast._refreshed_step(x[:, 0], token, state.fast, full=full)
        return logits, State(blocks, fast)

    def _answer(self, x, fast, full):
        """Logits (B, V) for features x (B, D) by what a Fast Weight Layer has learned, and its state without x.

        A whole chunk of earlier tokens that waits in the state is learned.
        """
        if not isinstance(fast, RefreshState):
            return self.fast.step(x, None, fast)[0], fast
        logits, after = self.fast._refreshed_step(x, None, fast, full=full)
        learned = after.waiting <= fast.waiting  # rows whose chunk was whole: x waits alone there
        return logits, fast._replace(
            dense1=after.dense1, dense2=after.dense2, norm=after.norm, waiting=torch.where(learned, 0, fast.waiting)
        )

    @torch.no_grad()
    def read(
        self,
        text: bytes | str | np.ndarray,
        memory: Memory | None = None,
        *,
        segment: int | None = None,
        advance: Callable[[int], Any] = lambda n: None,
    ) -> Memory:
        """Read a text of any length once, after `memory` if given; the memory has the same size for any length.

        Args:
            text: bytes or str, which the tokenizer of the run encodes, or tokens (T,).
            memory: what was read before, to go on from; the start of a document when absent.
            segment: tokens read at a time, which changes speed alone; more on a GPU than on a CPU when absent.
            advance: advance(tokens) after every segment, for a progress bar.

        Returns:
            A `Memory`, to generate from, save, or read more into.
        """
        was_training = self.training
        self.eval()
        tokens = self._tokens(text, memory)
        state = self.init_state(1) if memory is None else self._take(memory).state
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        segment = segment or self._segment(inputs)
        if isinstance(state.fast, RefreshState) and inputs.shape[1]:  # one of the tokens generated before is unlearned
            state = state._replace(fast=self.fast.label_waiting(inputs[:, 0], state.fast))
        elif state.fast is not None and state.fast.waiting.any():
            segment = 1
        for at in range(0, inputs.shape[1], segment):
            part = slice(at, at + segment)
            if segment == 1:
                _, state = self.step(inputs[:, at], state)
            elif self.fast is None:  # no loss is asked for
                state = State(self(inputs[:, part], state)[1], None)
            else:
                state = self.score(inputs[:, part], labels[:, part], state, slow=False).state
            advance(inputs[:, part].shape[1])
        self.train(was_training)
        count = tokens.shape[1] + (0 if memory is None else memory.count - 1)
        return Memory(map_tensors(Tensor.detach, state), int(tokens[0, -1]), count, self.fingerprint())

    def _segment(self, inputs):
        """Tokens to read at a time: a GPU wants many, unless every one of them is compared with all before it."""
        softmax = any(name in ("transformer", "softmax") for name in self.config.mixers)
        return LONG_SEGMENT if inputs.is_cuda and self.fast is None and not softmax else SEGMENT

    def _tokens(self, text, memory):
        """(1, 1 + T): the token before a text, that of the memory or the start of a document, and the text's own."""
        if isinstance(text, str):
            try:
                text = text.encode()
            except UnicodeEncodeError as error:
                raise FastWeightError(
                    f"text has {error.object[error.start]!a}; expected characters, or bytes"
                ) from None
        if isinstance(text, bytes | bytearray | memoryview):
            encoded = self.tokenizer.encode(bytes(text))
        else:
            encoded = np.asarray(text)
            whole = encoded.ndim == 1 and (encoded.dtype.kind in "iu" or not encoded.size)
            if not whole or (encoded.size and not 0 <= encoded.min() <= encoded.max() < self.vocab):
                got = f"of {encoded.dtype} and shape {encoded.shape}" if not whole else f"{text!r:.80}"
                raise FastWeightError(
                    f"text is {got}; expected bytes, str, or tokens (T,): whole numbers from 0 to {self.vocab - 1}"
                )
            encoded = encoded.astype(np.int64)
        before = [self.vocab - 1 if memory is None else memory.last]
        return torch.from_numpy(np.r_[before, encoded])[None].to(self.embedding.weight.device)

    def _take(self, memory):
        """A memory on this model's device, once it is known to be of these weights."""
        if not isinstance(memory, Memory):
            raise FastWeightError(f"memory is a {type(memory).__name__}; expected a Memory, as model.read returns it")
        memory.check(self.fingerprint())
        return memory.to(self.embedding.weight.device)

    def fingerprint(self) -> str:
        """Of the configuration and the weights: what a memory belongs to.

        All weights are copied to the host and read for it, so it is kept until one of them changes.
        """
        weights = {name: x.detach() for name, x in self.state_dict().items()}
        known = _seen(weights.values())
        if self._fingerprint is None or self._fingerprint[0] != known:
            digest = hashlib.sha256(json.dumps([self.config.fingerprint, self.vocab]).encode())
            for name, x in weights.items():
                digest.update(name.encode())
                digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.dim() else b"")
            self._fingerprint = known, digest.hexdigest()[:32]
        return self._fingerprint[1]


def _seen(weights: Iterable[Tensor]) -> list[Any]:
    """What tells quickly whether weights are still the same: where they are, how often they were written, their length.

    The length also shows what was written through `.data`, which is not counted.
    """
    return [
        (x.data_ptr(), x.dtype, None if x.is_inference() else x._version, float(torch.linalg.vector_norm(x)))
        for x in weights
        if x.is_floating_point() and x.dim()
    ]
