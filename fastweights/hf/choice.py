"""Which token follows: chosen from logits as `generate` of transformers chooses it, on a GPU as a CUDA graph."""

from typing import Any

import torch
from torch import Tensor

from fastweights.models.decoding import Decoder

# Logits processors that look at scores alone, so that a recording of them holds for every text
OF_SCORES = {f"{name}LogitsWarper" for name in ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon")}
OF_SCORES |= {"SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization"}


class Choice:
    """The next token (B,) of each text: the likeliest or a drawn one of processed scores, and padding after an end.

    processors: those of `OF_SCORES`;  config: of the generation;  ends: tokens that end a text, or None;  given:
    whether the token that the decoder has chosen, the likeliest, is the one.

    Attributes:
        going: (B,), whether a text has not ended.
        sums: (B,), of what was drawn: NaN once a probability was.
    """

    def __init__(self, processors: list[Any], config: Any, ends: Tensor | None, *, given: bool):
        self.processors, self.ends, self.given = processors, ends, given
        self.draws = bool(config.do_sample)
        self.pad: Any = None if ends is None else config._pad_token_tensor.to(ends.device)
        self.going: Any = None
        self.sums: Any = None
        self.graph: Any = None  # False where it cannot be recorded

    def start(self, token: Tensor) -> None:
        """Begin with texts that end with token (B,)."""
        self._keep(self._goes_on(token), torch.zeros(len(token), device=token.device))

    def __call__(self, logits: Tensor, decoder: Decoder) -> None:
        """Choose from logits (B, V), which stay where they are, and tell the decoder."""
        if self.given and self.ends is None:
            return  # the decoder has chosen
        if decoder.captured and self.graph is None:
            self.graph = self._recorded(logits, decoder.token)
        if decoder.captured and self.graph:
            self.graph.replay()
        else:
            token, going, sums = self._chosen(logits, decoder.token)
            decoder.load(token)
            self._keep(going, sums)

    def _keep(self, going, sums):
        """Note who goes on, and what was drawn: where a graph finds it, if there is one."""
        if self.graph:
            self.going.copy_(going)
            self.sums.copy_(sums)
        else:
            self.going, self.sums = going, sums

    def _chosen(self, logits, token):
        """(token, going, sums) after these logits; token: the likeliest."""
        going, sums = self.going, self.sums
        if not self.given:
            for processor in self.processors:
                logits = processor(None, logits)
            token = logits.argmax(-1)
        if self.draws:
            token, sums = drawn(logits, sums)
        if self.ends is not None:
            token = torch.where(going, token, self.pad)
            going = going & self._goes_on(token)
        return token, going, sums

    def _goes_on(self, token):
        """(B,): whether token (B,) is none that ends a text."""
        if self.ends is None:
            return torch.ones_like(token, dtype=torch.bool)
        return (token[:, None] != self.ends).all(1)

    def _recorded(self, logits, token):
        """A CUDA graph that reads logits, and reads and overwrites token, going and sums; False where there is none.

        It must choose what the call itself chooses with the same random numbers; nothing is changed by the trial.
        """
        held = token, self.going, self.sums
        before, random = [x.clone() for x in held], random_state(token.device)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._chosen(logits, token)  # makes the libraries' workspaces
        torch.cuda.current_stream().wait_stream(stream)
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for old, new in zip(held, self._chosen(logits, token), strict=True):
                    if old is not new:
                        old.copy_(new)
        except RuntimeError:
            random_state(token.device, random)
            return False
        random_state(token.device, random)
        want = self._chosen(logits, token)
        random_state(token.device, random)
        graph.replay()
        same = all(torch.equal(a, b) for a, b in zip(held[:2], want[:2], strict=True))
        for x, old in zip(held, before, strict=True):
            x.copy_(old)
        random_state(token.device, random)
        return graph if same else False


def drawn(scores: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """A token (B,) by scores (B, V), and sums + what was drawn, NaN where a probability is.

    On a GPU as `torch.multinomial` draws it, without its wait for the device.
    """
    p = scores.softmax(-1)
    if not p.is_cuda:
        return torch.multinomial(p, 1)[:, 0], sums
    best, token = (p / torch.empty_like(p).exponential_(1)).max(-1)
    return token, sums + best


def random_state(device: torch.device, state: Tensor | None = None) -> Tensor:
    """The state of the source of chance on a device, set to `state` first where that is given."""
    source: Any = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    if state is not None:
        source.set_state(state)
    return source.get_state()
