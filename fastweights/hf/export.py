"""A run of `fastweights train` as a folder that the ecosystem loads: weights, configuration and tokenizer."""

from pathlib import Path
from typing import Any

import torch

from fastweights.core import FastWeightError
from fastweights.files import replacing
from fastweights.hf.config import FastWeightConfig
from fastweights.hf.model import FastWeightForCausalLM
from fastweights.models import run_folder
from fastweights.models.language_model import LanguageModel
from fastweights.text.tokenizer import Bytes, Subwords

START = "<|start|>"  # of a document: the last token of every vocabulary
WHITE = (9, 10, 11, 12, 13, 32, 0x85, 0xA0)  # what \s means in Latin-1


def export(run: str | Path, target: str | Path, *, last: bool = False) -> FastWeightForCausalLM:
    """Write the model of a run into the folder `target`, as `save_pretrained` would; returns the model.

    `AutoModelForCausalLM.from_pretrained(target)` and `AutoTokenizer.from_pretrained(target)` read it, once
    `fastweights.hf` is imported. Logits and tokens are those of the run.

    Args:
        run: folder that `fastweights train` made.
        target: new or empty folder; it appears when it is complete.
        last: take the last weights rather than those with the best validation loss.

    Raises:
        FastWeightError: the target holds something, or the run cannot be read.
    """
    target = Path(target)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise FastWeightError(f"{target} exists; expected a new or an empty folder: nothing is overwritten")
    source = run_folder.load(run, last=last, device="cpu")
    model = from_language_model(source)
    with replacing(target) as temporary:
        model.save_pretrained(temporary)
        tokenizer_of(source.tokenizer).save_pretrained(temporary)
    return model


@torch.no_grad()
def from_language_model(source: LanguageModel) -> FastWeightForCausalLM:
    """The same model with the ecosystem's interface: equal logits, a copy of the weights.

    Weights keep their names but for the body, which the ecosystem calls `model`, and the embedding, which it calls
    `embed_tokens`. The output matrix is the embedding itself, tied.

    Args:
        source: as `fastweights.load` returns it.
    """
    c, start = source.config, source.vocab - 1
    fast = c.fast_options | dict(size=c.fast_hidden)
    config = FastWeightConfig(
        vocab_size=source.vocab,
        hidden_size=c.dim,
        num_attention_heads=c.heads,
        mixers=list(c.mixers),
        intermediate_size=c.hidden,
        feed_forward=c.ff,
        sliding_window=c.window or c.length,
        head=c.head,
        fast=fast,
        dropout=c.dropout,
        bos_token_id=start,
        eos_token_id=start,
        pad_token_id=start,
    )
    model = FastWeightForCausalLM(config).eval()
    named = {"embedding.weight": "model.embed_tokens.weight"}
    weights = {}
    for name, x in source.state_dict().items():
        if name.startswith(("blocks.", "norm.")):
            name = f"model.{name}"
        if name != "fast.unembed":  # the embedding's
            weights[named.get(name, name)] = x
    # Only the output matrix may be missing: it is the embedding, and is tied below.
    missing, extra = model.load_state_dict(weights, strict=False)
    assert {*missing, *extra} <= {"lm_head.weight"}, (missing, extra)
    model.tie_weights()
    return model


def tokenizer_of(ours: Bytes | Subwords) -> Any:
    """The same tokens for the same text, with the start of a document in front, as the model was trained.

    Returns:
        A `PreTrainedTokenizerFast`. Its start token is also the end of a text and the padding, on the left.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = (
        Tokenizer.from_str(ours.tokenizer.to_str()) if isinstance(ours, Subwords) and not ours.latin else _bytes(ours)
    )
    inner.add_special_tokens([START])
    number = inner.token_to_id(START)
    assert number == ours.start, (number, ours.start)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A {START} $B", special_tokens=[(START, number)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=START,
        eos_token=START,
        pad_token=START,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _bytes(ours: Bytes | Subwords) -> Any:
    """A tokenizer of bytes in the ecosystem's spelling, in which each byte is a printable character.

    Our vocabulary spells byte b as the character with number b. The ecosystem's ByteLevel spells unprintable bytes by
    other characters, so vocabulary, merges and the pattern that cuts words are all respelled.

    Args:
        ours: of bytes, or of pieces of words that are spelled in Latin-1.
    """
    import json

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    spelled = _spelling()
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if isinstance(ours, Bytes):
        vocab, merges = {spelled[b]: b for b in range(256)}, []
    else:
        model = json.loads(ours.tokenizer.to_str())["model"]
        change = lambda text: "".join(spelled[ord(c)] for c in text)  # noqa: E731
        vocab = {change(text): i for text, i in model["vocab"].items()}
        # Older files write a merge as one string, newer ones as a pair.
        pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
        merges = [(change(a), change(b)) for a, b in pairs]
        steps.append(pre_tokenizers.Split(Regex(_words(spelled)), "isolated"))
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    inner.decoder = decoders.ByteLevel()
    return inner


def _spelling() -> list[str]:
    """The printable character that stands for each byte (GPT-2's table).

    Examples:
        >>> _spelling()[ord("a")], _spelling()[ord(" ")]
        ('a', 'Ġ')
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return [chr(b) if b in plain else chr(256 + others.index(b)) for b in range(256)]


def _words(spelled: list[str]) -> str:
    r"""The pattern of `Subwords.train` in that spelling.

    Classes such as \s mean other characters once bytes are respelled, so each is written out.
    """
    white = "".join(spelled[b] for b in WHITE)
    letters = "A-Za-z_" + "".join(spelled[0x80:])
    space, line, tab = (spelled[ord(c)] for c in " \n\t")
    return (
        f"{space}?[{letters}]+|{space}?[0-9]{{1,3}}|{space}?[^{white}{letters}0-9]+|{line}[{space}{tab}]*|"
        f"[{white}]+(?![^{white}])|[{white}]"
    )
