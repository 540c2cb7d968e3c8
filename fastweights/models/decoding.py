"""Texts that grow token by token. On a GPU a step is a CUDA graph, one launch in place of hundreds.

Sampling is a part of the step: the next token is drawn on the device, where the next step finds it, so that a step can
be queued before the host has seen the token of the last one.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastweights.attention import AttentionState
from fastweights.models.language_model import LanguageModel, State
from fastweights.refresh import RefreshState
from fastweights.torch import graphs, watching
from fastweights.torch.hand_gradients import HAS_TRITON
from fastweights.torch.private import copy_all
from fastweights.torch.tree import flatten, map_tensors

Pick = Callable[[Tensor, Tensor], Tensor]  # logits (B, V), noise (B,) in [0, 1) -> tokens (B,)


class Decoder:
    """B texts; each call writes one token of each.

        >>> from fastweights.models.config import Config
        >>> model = LanguageModel(Config(dim=16, heads=2, depth=1), vocab=257).eval()
        >>> likeliest = lambda logits, noise: logits.argmax(-1)
        >>> decoder = Decoder(model, model.init_state(2), torch.tensor([256, 256]), likeliest)
        >>> decoder(torch.zeros(2)).shape, decoder.how
        (torch.Size([2]), 'eager (x is not on a GPU)')

    model: a `LanguageModel`, or what has its `step` and its `fast`;  token (B,): the last token of each text;  state:
    before it;  pick: draws the next token;  learn: whether a Fast Weight Layer learns;  capture: False for no CUDA
    graph.

    A CUDA graph is recorded at the first step and replayed from then on: the same kernels on the same addresses. That
    is why token, state and noise live in tensors of their own, which each step reads and overwrites. A Fast Weight
    Layer that learns chunk by chunk has two kinds of steps, one that learns and one that does not, and so two graphs.
    """

    def __init__(
        self,
        model: LanguageModel | Any,
        state: State,
        token: Tensor,
        pick: Pick,
        *,
        learn: bool = True,
        capture: bool = True,
    ):
        self.model, self.pick, self.learn = model, pick, learn
        reason = graphs.refuses(token) if capture else "it was asked for"
        self.token, self.state = token, state
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.waiting = self.waiting_of(state)
        if reason is None and self.waiting == -1:
            reason = "texts wait with different numbers of tokens for the Fast Weight Layer"
        if watching.watchers or watching.steps:
            reason = "a probe looks on"
        self.how = "captured (a step is a CUDA graph)" if reason is None else f"eager ({reason})"
        self.captured = reason is None
        if self.captured:
            self.token, self.state = token.clone(), map_tensors(torch.clone, state)
            self.noise = torch.zeros(len(token), device=token.device)

    def waiting_of(self, state: State) -> int | None:
        """Tokens that wait for a refreshed layer, in every text; -1 where these differ, None without such a layer."""
        if not isinstance(state.fast, RefreshState) or self.model.fast.config.within != "held":
            return -1 if isinstance(state.fast, RefreshState) else None
        counts = set(state.fast.waiting.tolist())
        return counts.pop() if len(counts) == 1 else -1

    def _full(self) -> bool | None:
        """Whether the layer learns from a whole chunk in this step; counts the token of the step if it is learned."""
        if self.waiting is None or self.waiting < 0:
            return None
        full = self.waiting == self.model.fast.config.refresh
        self.waiting = (0 if full else self.waiting) + self.learn
        return full

    def load(self, token: Tensor, state: State | None = None) -> None:
        """Go on with other tokens (B,), and with another state of as many texts where one is given."""
        if self.captured:
            self.token.copy_(token)
        else:
            self.token = token
        if state is None:
            return
        if self.captured:
            _overwrite(self.state, state)
        else:
            self.state = state
        self.waiting = self.waiting_of(state)

    @torch.no_grad()
    def __call__(self, noise: Tensor) -> Tensor:
        """The next token (B,) of each text, on the device; it stays as it is until the call after.

        Args:
            noise: (B,), uniform in [0, 1), by which `pick` draws.
        """
        if self.captured:
            self.noise.copy_(noise)
        self.advance(noise)
        return self.token.clone() if self.captured else self.token

    @torch.no_grad()
    def advance(self, noise: Tensor | None = None) -> None:
        """One more token of each text, which `token` holds then; captured, by the noise of the last call."""
        full = self._full()
        if not self.captured:
            self.token, self.state = self._step(self.token, self.state, noise, full)
            return
        kind = bool(full)
        if kind not in self.graphs:
            reason = self._capture(kind, full)
            if reason is not None:
                warnings.warn(f"tokens are generated without a CUDA graph; capturing failed: {reason}", stacklevel=3)
                self.captured, self.how = False, f"eager (capturing failed: {reason})"
                self.token, self.state = self._step(self.token, self.state, noise, full)
                return
        self.graphs[kind].replay()

    def _step(self, token: Tensor, state: State, noise: Any, full: bool | None) -> tuple[Tensor, State]:
        """One token through the model, and the next one drawn: what is captured, and what runs where nothing is."""
        logits, state = self.model.step(token, state, learn=self.learn, full=full)
        return self.pick(logits, noise), state

    def _capture(self, kind: bool, full: bool | None) -> str | None:
        """Record a step that reads and overwrites `token` and `state`; why it cannot be, or None.

        The step runs twice before it is recorded, on a stream of its own: what is compiled, tuned or allocated for the
        first time may not happen inside a graph. Those two runs write nothing that is kept.

        Args:
            kind: which of the two graphs.
            full: whether the Fast Weight Layer learns in this step; None where it has no chunks.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and makes the libraries' workspaces; changes nothing
                self._step(self.token, self.state, self.noise, full)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Nothing runs while it is recorded; what is recorded writes the memories where they are.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), _in_place(self.state):
                token, state = self._step(self.token, self.state, self.noise, full)
                self.token.copy_(token)
                _overwrite(self.state, state)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        if not self._agrees(graph, full):
            return "a replay left another state than the step itself"
        self.graphs[kind] = graph
        return None

    def _agrees(self, graph: Any, full: bool | None) -> bool:
        """Whether replays leave the state that the step itself leaves; token and state are then put back as they were.

        Two steps in a row where they are of one kind, since a number that was recorded by mistake shows in the second.
        """
        before = self.token.clone(), map_tensors(torch.clone, self.state)
        agree = True
        for _ in range(2 if full is None else 1):
            _, want = self._step(self.token.clone(), map_tensors(torch.clone, self.state), self.noise, full)
            graph.replay()
            pairs = zip(flatten(self.state), flatten(want), strict=True)
            agree = agree and all(graphs.close(a, b) for (_, a), (_, b) in pairs)
        self.token.copy_(before[0])
        _overwrite(self.state, before[1])
        return agree


def _in_place(state: State) -> AbstractContextManager:
    """While it lasts, kernels for one token write into the memories of a state; without kernels it does nothing.

    Attention norm reads its sums twice in a step, so layers with that norm are left out.
    """
    if not HAS_TRITON:
        return nullcontext()
    from fastweights.torch.kernels import step

    return step.in_place([s.memory for s in state.blocks if isinstance(s, AttentionState) and s.z is None])


def _overwrite(state: Any, by: Any) -> None:
    """Copy every tensor of one state into its place in another: a graph finds the state where it was recorded."""
    pairs = [(old, new) for (_, old), (_, new) in zip(flatten(state), flatten(by), strict=True) if old is not new]
    if pairs:
        copy_all([old for old, _ in pairs], [new for _, new in pairs])
