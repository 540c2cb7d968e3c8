"""`generate` of transformers for our models, without its wait for the device at every token.

The loop of transformers prepares its inputs anew for each token, and then asks the device whether all texts have ended.
Here its loop writes the first token, with all that belongs to reading a prompt. The tokens after it are steps of a
`Decoder`, on a GPU one CUDA graph each, and several are queued before the host looks for an end. Tokens that were
written after it are cut off, and the state goes back to that of the last token that stays.

Greedy decoding and sampling run like this, with the processors of `SERVED`; they get the same scores in the same order
and draw the same random numbers, so that the tokens are those of transformers' loop. Anything else is left to it.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fastweights import checks
from fastweights.debugging import debugging
from fastweights.hf import captured
from fastweights.hf.cache import FastWeightCache
from fastweights.hf.choice import OF_SCORES, Choice, random_state
from fastweights.models.decoding import Decoder
from fastweights.models.language_model import State
from fastweights.torch import graphs
from fastweights.torch.tree import flatten, map_tensors, tensor_bytes

LOG = checks.LOG.getChild("generate")
AHEAD = 8  # tokens that a GPU is given before the host looks whether the texts have ended
FEW = 16  # tokens for which no graph is recorded
KEPT = 4  # decoders per model whose graphs are kept, the last ones used
LARGE = 2**28  # bytes of a state beyond which a decoder is not kept
# Logits processors that are functions of tokens and scores alone, and need nothing from the host
SERVED = {
    f"{name}Logits{kind}"
    for kind, names in {
        "Warper": ("Temperature", "TopK", "TopP", "TopH", "MinP", "Typical", "Epsilon", "Eta"),
        "Processor": (
            *("RepetitionPenalty", "EncoderRepetitionPenalty", "MinLength", "MinNewTokensLength", "SuppressTokens"),
            *("SuppressTokensAtBegin", "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove"),
        ),
    }.items()
    for name in names
} | {"LogitNormalization", "ExponentialDecayLengthPenalty"}
# Arguments of the forward pass that say nothing of a token that follows others
HANDED = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "logits_to_keep"}
HANDED |= {"cache_position", "token_type_ids", "tokenizer"}

_kept: Any = weakref.WeakKeyDictionary()  # by model: its decoders, by what their graphs were recorded for


class Steps:
    """What a `Decoder` asks of a model, for a `FastWeightForCausalLM`: one token through all of it.

    It does not keep the model alive. `logits` (B, V), float32, stays where it is, and each step overwrites it.
    """

    def __init__(self, model: nn.Module):
        self.model: Any = weakref.proxy(model)
        self.logits: Any = None
        self.decoder: Any = None  # the last one that recorded a step
        self.running: Any = None
        self.choices: dict[str, Choice] = {}
        self.busy = threading.Lock()

    def start(self, token: Tensor, state: State) -> Decoder:
        """A decoder after these tokens (B,); that of an earlier call where there is one, with its graph."""
        of = lambda state: [(x.shape, x.dtype) for _, x in flatten(state)]  # noqa: E731
        known = self.decoder
        if known is not None and of(known.state) == of(state) and not (known.learn and known.waiting_of(state) == -1):
            known.load(token, state)
            self.running = known
        else:
            self.running = Decoder(self, state, token, self.likeliest, learn=self.model.config.adapt)
            if self.running.captured:
                self.decoder, self.choices = self.running, {}
        return self.running

    def choice(self, processors: list[Any], of_text: int, config: Any, ends: Tensor | None) -> Choice:
        """How tokens are chosen, by an earlier call's recording where one is kept.

        Args:
            processors: all of them.
            of_text: how many of them come first that look at the text, or stand before one that does.
            config: of the generation.
            ends: tokens that end a text, or None.
        """
        given, rest = not processors and not config.do_sample, list(processors[of_text:])
        told = lambda x: x.tolist() if isinstance(x, Tensor) else x  # noqa: E731
        settings = [(type(x).__name__, [(name, told(y)) for name, y in sorted(vars(x).items())]) for x in rest]
        key = repr((given, config.do_sample, settings, told(ends), told(config._pad_token_tensor)))
        if key not in self.choices:
            self.choices[key] = Choice(rest, config, ends, given=given)
            while len(self.choices) > KEPT:
                del self.choices[next(iter(self.choices))]
        return self.choices[key]

    def rest(self) -> None:
        """Keep nothing between calls but a graph, and that only where its state is small."""
        self.running = None
        if self.decoder is not None and tensor_bytes(self.decoder.state) > LARGE:
            self.decoder, self.choices = None, {}

    @property
    def fast(self) -> Any:
        """The Fast Weight Layer, or None."""
        return self.model.fast

    def step(self, token: Tensor, state: State, *, learn: bool, full: bool | None) -> tuple[Tensor, State]:
        """Logits (B, V) for what follows token (B,), and the state after it.

        Args:
            token, state: of each text.
            learn: whether a Fast Weight Layer learns.
            full: whether it learns from a whole chunk now; None where it has no chunks.
        """
        body, tokens = self.model.model, token[:, None]
        blocks: list[Any] = []
        x = body.embed_tokens(tokens)
        if not self.running.captured and captured.refuses(body.blocks, body.norm, x, state.blocks) is None:
            x, blocks = captured.step(body.blocks, body.norm, x, state.blocks)
        else:
            for block, memory in zip(body.blocks, state.blocks, strict=True):
                x, memory = block(x, memory, None, None)
                blocks.append(memory)
            x = body.norm(x)
        unembed, fast = self.model.lm_head, state.fast
        if self.fast is not None:
            x, fast = self.fast(x, tokens, unembed.weight, state=fast, learn=learn, full=full)
        return unembed(x)[:, -1], State(blocks, fast)

    def likeliest(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """The likeliest token (B,); the logits are left for those who choose otherwise."""
        if self.logits is None:
            self.logits = torch.empty_like(logits, dtype=torch.float32)
        self.logits.copy_(logits)
        return self.logits.argmax(-1)


def sample(
    model: Any,
    theirs: Callable[..., Any],
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    synced_gpus: bool,
    streamer: Any,
    given: dict[str, Any],
) -> Any:
    """What `_sample` of transformers returns, by our loop where it serves and else by theirs; a debug line says which.

    Args:
        model: a `FastWeightForCausalLM`.
        theirs: `_sample` of transformers, bound to the model.
        input_ids: (B, T), the prompts.
        processors, criteria, config, synced_gpus, streamer: as `_sample` gets them.
        given: the keywords of the forward pass, the cache among them.
    """
    steps: Any = refuses(model, input_ids, processors, criteria, config, synced_gpus, given)
    steps = _steps(model, input_ids, criteria) if steps is None else steps
    if isinstance(steps, Steps) and not steps.busy.acquire(blocking=False):
        steps = "another thread generates with this model"
    if isinstance(steps, str):
        LOG.debug("generate: the loop of transformers, since %s", steps)
        how = dict(synced_gpus=synced_gpus, streamer=streamer)
        return theirs(input_ids, processors, criteria, config, **how, **given)
    try:
        # Their loop reads the prompt and writes the first token, whatever the prompt is and goes on from.
        one = StoppingCriteriaList([MaxLengthCriteria(input_ids.shape[1] + 1)])
        first = theirs(input_ids, processors, one, config, **given)
        text = first.sequences if config.return_dict_in_generate else first
        cache = given["past_key_values"]
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(input_ids):
            text = _write(steps, text, processors, criteria, config, streamer, cache)
    finally:
        steps.rest()
        steps.busy.release()
    return GenerateDecoderOnlyOutput(sequences=text, past_key_values=cache) if config.return_dict_in_generate else text


class Texts:
    """B texts that grow token by token, and what ends them.

    tokens (B, at least length);  length: tokens of each text so far, the same for all: one that has ended is padded.
    """

    def __init__(self, tokens: Tensor, criteria: Any, choice: Choice):
        self.tokens, self.first, self.length = tokens, tokens.shape[1], tokens.shape[1]
        self.limit, self.choice = _longest(criteria), choice
        self.times = [x for x in criteria if type(x) is MaxTimeCriteria]

    @property
    def now(self) -> Tensor:
        """(B, length)."""
        return self.tokens[:, : self.length]

    def add(self, token: Tensor) -> None:
        """Write a token (B,) of each text."""
        if self.length == self.tokens.shape[1]:
            more = self.tokens.new_empty(len(token), min(max(self.length, 256), self.limit - self.length))
            self.tokens = torch.cat([self.tokens, more], 1)
        self.tokens[:, self.length] = token
        self.length += 1

    def over(self) -> bool:
        """Whether all texts have ended; what was written after the end of the last one is cut off then."""
        choice = self.choice
        if choice.draws and bool(choice.sums.isnan().any()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if choice.ends is not None and not bool(choice.going.any()):
            written = self.tokens[:, self.first - 1 : self.length]
            ended = (written[..., None] == choice.ends).any(-1).int().argmax(1)  # (B,), each text's first
            self.length = self.first + int(ended.max())
            return True
        late = any(time.time() - x.initial_timestamp > x.max_time for x in self.times)
        return self.length >= self.limit or late


def _write(steps, tokens, processors, criteria, config, streamer, cache):
    """The texts (B, T) with all tokens that follow; the cache goes on with them where someone will see it.

    Args:
        steps: of the model.
        tokens: (B, T), the prompts and one token after each, which the cache has not read.
        processors, criteria, config, streamer: as `sample` gets them.
        cache: after the prompts.
    """
    decoder, device = steps.start(tokens[:, -1], cache.state), tokens.device
    LOG.debug("generate: our loop, %s", decoder.how)
    ends = [x.eos_token_id.to(device).flatten() for x in criteria if type(x) is EosTokenCriteria]
    of_text = 1 + max((i for i, x in enumerate(processors) if type(x).__name__ not in OF_SCORES), default=-1)
    choice = steps.choice(processors, of_text, config, torch.cat(ends) if ends else None)
    choice.start(tokens[:, -1])
    texts, kept = Texts(tokens, criteria, choice), config.return_dict_in_generate or not cache.temporary
    begin, before, random, queued = texts.length - 1, None, None, 0
    while True:
        over = texts.over()
        if streamer is not None:
            for token in texts.now[:, begin:].cpu().unbind(1):
                streamer.put(token)
        if over:
            break
        begin = texts.length
        if choice.draws:
            random = random_state(device)
        if kept and ends:
            before = map_tensors(torch.clone, decoder.state) if decoder.captured else decoder.state
        queued = min(_ahead(tokens), texts.limit - begin)
        for _ in range(queued):
            decoder.advance()
            scores = steps.logits
            for processor in processors[:of_text]:
                scores = processor(texts.now, scores)
            if of_text:
                steps.logits.copy_(scores)
            choice(steps.logits, decoder)
            texts.add(decoder.token)
    if streamer is not None:
        streamer.end()
    cut = texts.length < begin + queued  # some were written after the end
    if cut and choice.draws:
        random_state(device, random)
        for _ in range(begin, texts.length):  # drawn, and no more
            torch.empty_like(steps.logits).exponential_(1)
    if kept:
        if cut:  # those before the end are read again
            decoder.load(texts.tokens[:, begin - 1], before)
            for i in range(begin, texts.length):
                decoder.advance()
                decoder.load(texts.tokens[:, i])
        cache.state = map_tensors(torch.clone, decoder.state) if decoder.captured else decoder.state
        cache.seen += texts.length - texts.first
    return texts.now.contiguous()


def _ahead(tokens):
    """How many tokens are queued before the host looks at them: on a CPU nothing waits in a queue."""
    return AHEAD if tokens.is_cuda else 1


def _longest(criteria):
    """The number of tokens that no text exceeds."""
    return min(x.max_length for x in criteria if type(x) is MaxLengthCriteria)


def refuses(
    model: Any, input_ids: Tensor, processors: Any, criteria: Any, config: Any, synced: bool, given: dict[str, Any]
) -> str | None:
    """Why a call is left to the loop of transformers, or None.  Arguments as of `sample`."""
    cache = given.get("past_key_values")
    if not isinstance(cache, FastWeightCache) or not given.get("use_cache", True):
        return "there is no cache"
    if cache.recording or cache.layers or config.is_assistant:
        return "the cache keeps more than the state"
    outputs = [f"output_{name}" for name in ("scores", "logits", "hidden_states", "attentions")]
    wanted = [name for name in outputs if getattr(config, name) or getattr(model.config, name, False)]
    other = [name for name, x in given.items() if x is not None and name not in HANDED]
    if synced or wanted or other:
        return f"{(*wanted, *other, 'synced_gpus')[0]} is asked for"
    for x in processors:
        if type(x).__name__ not in SERVED or not type(x).__module__.startswith("transformers."):
            return f"{type(x).__name__} may look at more than tokens and scores"
    for x in criteria:
        if type(x) not in (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria):
            return f"{type(x).__name__} looks at every token"
    kinds = [type(x) for x in criteria]
    if MaxLengthCriteria not in kinds or (EosTokenCriteria in kinds and config._pad_token_tensor is None):
        return "there is no longest text, or no padding for those that end"
    if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or debugging():
        return "the model is trained, compiled or looked into"
    if torch.is_autocast_enabled(input_ids.device.type) or input_ids.device != model.lm_head.weight.device:
        return "autocast is on, or tokens and weights are on different devices"
    if model._compiled_call_impl is not None or "prepare_inputs_for_generation" in vars(model):
        return "the model's calls are not its own"
    odd = {type(p).__name__ for p in model.parameters()} - {"Parameter"}  # of quantised and of sharded models
    return f"a weight is a {odd.pop()}" if odd else captured.looked_at(model.modules())


def _steps(model, input_ids, criteria):
    """The steps of a model for so many texts, of an earlier call where these are kept, or why there are none."""
    if graphs.refuses(input_ids) is not None:
        return Steps(model)
    at = tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))
    known, key = _kept.setdefault(model, OrderedDict()), (at, len(input_ids), model.config.adapt)
    for stale in [old for old in known if old[0] != at]:  # the weights are elsewhere now
        del known[stale]
    if key not in known and _longest(criteria) - input_ids.shape[1] - 1 < FEW:
        return "the tokens are too few to record a graph for"
    found = known.setdefault(key, Steps(model))
    known.move_to_end(key)
    while len(known) > KEPT:
        known.popitem(last=False)
    failed = found.decoder is not None and not found.decoder.captured
    return f"a step is {found.decoder.how}" if failed else found
