"""What a training run depends on: one frozen dataclass, whose fields are the options of `fastweights train`."""

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from fastweights.attention.presets import ALIASES
from fastweights.attention.presets import PRESETS as LAYERS
from fastweights.core import FastWeightError

MIXERS = (*LAYERS, *ALIASES)  # names of the layers' own table
OTHERS = ("transformer", "softmax", "lstm")

# Schlag et al. 2021, but for the norms (theirs follow the blocks) and the vocabulary
_PAPER: dict[str, Any] = dict(
    model="delta-network", head="linear", heads=8, depth=16, ff="relu", hidden=2048, dropout=0.1, warmup=2000,
    lr=2.5e-4, final_lr=0.0, clip=0.25, weight_decay=0.0, seed=1111, context="packed", eval_every=4000,
)  # fmt: skip

TRAIN_REFRESH = 64  # of presets: it costs less than reading every 32 tokens, and layers read as well with it

# Where they differ from the defaults below.
PRESETS: dict[str, dict[str, Any]] = {
    "laptop": dict(train_refresh=TRAIN_REFRESH),
    "gpu": dict(dim=768, heads=12, depth=12, tokenizer="bpe:16384", length=1024, batch=32, steps=20_000, warmup=500,
                lr=6e-4, eval_every=500, train_refresh=TRAIN_REFRESH),
    "paper-small": _PAPER | dict(dim=128, length=256, batch=96, steps=500_000),
    "paper-medium": _PAPER | dict(dim=256, length=384, batch=56, steps=400_000),
}  # fmt: skip

PUBLISHED: dict[str, Any] = dict(normalizer=256.0, step_size=0.5, decay=0.999)  # the published Fast Weight Layer

FAST_FIELDS = ("refresh", "train_refresh", "within", "fast_step", "fast_decay", "fast_clip", "step_lr")

DYNAMIC_LR = 8e-4  # of dynamic evaluation: the best of 5e-5 ... 1.6e-3 on validation files of the default run

CHOICES = dict(
    ff=("swiglu", "relu"), head=("linear", "fwl"), within=("held", "cumulative"), context=("carried", "packed"),
    parallel=("none", "ddp", "fsdp"), dtype=("auto", "float32", "bfloat16"), device=("auto", "cpu", "cuda"),
    preset=tuple(PRESETS),
)  # fmt: skip

# Fields that take numbers, which numbers these are, and how to say so.
RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("depth", "dim", "heads", "length", "batch", "accumulate", "steps", "eval_every"), lambda n: n >= 1, "at least 1"),
    (("hidden", "fast_hidden", "train_refresh", "window", "warmup", "minutes", "lr", "step_lr", "weight_decay",
      "fast_clip", "seed"), lambda n: n >= 0, "0 or more"),
    (("clip",), lambda n: n > 0, "above 0"),
    (("forget", "final_lr", "fast_decay"), lambda n: 0 <= n <= 1, "a share, from 0 to 1"),
)  # fmt: skip

MOST_BLOCKS = (
    4096  # and numbers up to MOST: configurations come from files, and a typing error must not fill the memory
)
MOST = 2**40


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raise unless a field's value, which may come from a file, is of its type; whole numbers are numbers too.

    Args:
        name: of the field.
        value: that it was given.
        kind: its type, as the dataclass says.
    """
    if kind == (bool | None):  # a switch that may be left to us
        if value is None:
            return
        kind = bool
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or (kind in (int, float) and not (math.isfinite(value) and abs(value) <= MOST)):
        number = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
        raise FastWeightError(f"{name} is {str(value)[:80]!r}; expected {number}")


def _trained_as_read(changes: dict[str, Any]) -> dict[str, Any]:
    """A refresh that was given holds in training too."""
    return {"train_refresh": 0} if "refresh" in changes else {}


def _of(default: Any, help: str, flag: str = "") -> Any:
    """A field with its default and what --help says of it; flag: the option's name where it is not the field's."""
    return field(default=default, metadata={"help": help, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a training run depends on; its fields are the options that `fastweights train --help` explains.

        >>> config = Config.of("laptop", dim=64, steps=100)  # a preset with changes
        >>> config.dim, config.model
        (64, 'gated-delta')

    It is frozen, and is saved with the run.
    """

    # What is read.
    data: str = _of("stdlib", "Documents to train on: stdlib, stdlib-modules, a file, a folder, or hf:NAME[:CONFIG].")
    tokenizer: str = _of("bytes", "Tokenizer: bytes, bpe:SIZE trained on the corpus, or a tokenizer.json.")
    # The blocks.
    model: str = _of("gated-delta", "Mixer of every block: transformer, linear, performer, delta, gated-delta or lstm.")
    layers: str = _of(
        "", 'Mixers of the blocks as a pattern, such as "delta*3,softmax", in place of --model and --depth.'
    )
    depth: int = _of(4, "Number of blocks.")
    dim: int = _of(128, "Width of the model: features per token.")
    heads: int = _of(4, "Memories or attention heads per block.")
    ff: str = _of("swiglu", "Feed-forward layer of every block: swiglu or relu.")
    hidden: int = _of(0, "Width of the feed-forward layer; 0 for 4 dim (relu) or 8/3 dim (swiglu).")
    # The output layer.
    head: str = _of("fwl", "Output layer: linear, or fwl, a Fast Weight Layer, which learns from the text it reads.")
    fast_hidden: int = _of(0, "Hidden width of the Fast Weight Layer; 0 for 2 dim.")
    refresh: int = _of(
        32, "Tokens between updates of the Fast Weight Layer; 0 for the published one, whose gradients just add up."
    )
    train_refresh: int = _of(
        0,
        "Tokens between updates of the Fast Weight Layer in training; when absent --refresh if that is given, else 64.",
    )
    within: str = _of(
        "held",
        "Between updates the layer answers with its weights as they were (held) or with what came since (cumulative).",
    )
    fast_step: float = _of(1.0, "Step size before training changes it; 1 moves an output by its own gradient.")
    fast_decay: float = _of(0.0, "Share of what was learned that is kept per token; 0 for all (published: 0.999).")
    fast_clip: float = _of(0.0, "Largest norm of one token's gradient in the Fast Weight Layer; 0 for any.")
    start: str = _of("", "Trained run whose weights are kept; a Fast Weight Layer alone is trained.", "--from")
    # How text is cut into segments, and what is carried between them.
    dropout: float = _of(0.0, "Share of features dropped after every mixer and feed-forward layer.")
    window: int = _of(0, "Tokens that softmax attention looks back; 0 for --length.")
    context: str = _of(
        "carried", "Memory between segments: carried (it goes on) or packed (every segment starts anew)."
    )
    forget: float = _of(0.1, "Share of segments that start with an empty memory although memory is carried.")
    length: int = _of(256, "Tokens per segment, the span of backpropagation.")
    batch: int = _of(8, "Segments per step and device.")
    # How long and how fast it is trained.
    accumulate: int = _of(1, "Batches per step of the optimiser.")
    steps: int = _of(2000, "Steps of the optimiser.")
    minutes: float = _of(0.0, "Minutes within which training finishes, the schedule included; 0 for no limit.")
    lr: float = _of(3e-3, "Peak learning rate.")
    step_lr: float = _of(0.02, "Peak learning rate of the logarithms of the Fast Weight Layer's steps.")
    final_lr: float = _of(0.05, "Share of the peak learning rate that is left at the end of the cosine.")
    warmup: int = _of(50, "Steps in which the learning rate rises to its peak.")
    clip: float = _of(1.0, "Largest norm of the gradient; a longer one is scaled down to it.")
    weight_decay: float = _of(0.1, "Weight decay of the matrices.")
    seed: int = _of(0, "Seed of the weights, the order of documents and dropout.")
    eval_every: int = _of(200, "Steps between validations and checkpoints.")
    # Where, and how products are made.
    device: str = _of("auto", "Device to train on: auto, cpu or cuda.")
    dtype: str = _of("auto", "Dtype of the products: auto (bfloat16 on a GPU), float32 or bfloat16.")
    compile: bool | None = _of(
        None, "Compile the blocks with torch.compile; when absent, on a GPU.", "--compile/--no-compile"
    )
    checkpointing: bool = _of(False, "Recompute blocks in the backward pass to save memory.")
    parallel: str = _of("none", "How the processes of torchrun share the work: none, ddp or fsdp.")
    patience: float = _of(30.0, "Minutes that a process waits for the others before it gives them up as lost.")

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_type(f.name, getattr(self, f.name), f.type)
        for name, choices in CHOICES.items():
            if getattr(self, name, choices[0]) not in choices:
                raise FastWeightError(f"{name} is {getattr(self, name)!r}; expected {' or '.join(map(repr, choices))}")
        for names, fits, expected in RANGES:
            for name in names:
                if not fits(getattr(self, name)):
                    raise FastWeightError(f"{name} is {getattr(self, name)}; expected {expected}")
        if self.dim % (2 * self.heads):
            raise FastWeightError(
                f"dim is {self.dim}; expected a multiple of {2 * self.heads}: heads are "
                f"{self.heads}, each of an even width"
            )
        if not 0 <= self.dropout < 1:
            raise FastWeightError(f"dropout is {self.dropout}; expected from 0 to below 1: the share left out")
        if self.refresh < 0:
            raise FastWeightError(
                f"refresh is {self.refresh}; expected tokens between updates, or 0 for the published layer"
            )
        if self.patience <= 0:
            raise FastWeightError(f"patience is {self.patience}; expected above 0: minutes to wait for other processes")
        if self.fast_step <= 0:
            raise FastWeightError(f"fast_step is {self.fast_step}; expected above 0: its logarithm is learned")
        self.mixers  # noqa: B018 - its checks

    @classmethod
    def of(cls, preset: str = "laptop", **changes: Any) -> "Config":
        """The preset with changes: `Config.of("gpu", dim=512)`.

        Args:
            preset: "laptop", "gpu", "paper-small" or "paper-medium".
            changes: fields that differ from it; an unknown one raises FastWeightError.
        """
        if preset not in PRESETS:
            raise FastWeightError(f"preset is {preset!r}; expected one of {', '.join(map(repr, PRESETS))}")
        for name in sorted(changes.keys() - {f.name for f in fields(cls)}):
            like = difflib.get_close_matches(name, [f.name for f in fields(cls)], 1)
            meant = f", such as {like[0]}" if like else ": those that `fastweights train --help` explains"
            raise FastWeightError(f"Config has no field {name}; expected a field that there is{meant}")
        return cls.read(PRESETS[preset] | _trained_as_read(changes) | changes)

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Config":
        """The configuration with these fields, which may come from a file."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise FastWeightError(
                f"config has {', '.join(sorted(unknown))}; expected fields of Config: it is from "
                "another version of fastweights"
            )
        return cls(**values)

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of each block.

        Examples:
            >>> Config(layers="delta*3,softmax").mixers
            ('delta', 'delta', 'delta', 'softmax')
        """
        names: list[str] = []
        for part in (self.layers or f"{self.model}*{self.depth}").split(","):
            match = re.fullmatch(r"\s*([\w-]+?)\s*(?:\*\s*(\d+))?\s*", part)
            if not match or match[1] not in (*MIXERS, *OTHERS):
                where = f"layers is {self.layers!r}" if self.layers else f"model is {self.model!r}"
                known = ", ".join(dict.fromkeys([*OTHERS, *MIXERS]))
                raise FastWeightError(f'{where}; expected names such as "delta*3,softmax" of: {known}')
            names += [match[1]] * min(int((match[2] or "1")[:9]), MOST_BLOCKS + 1)
            if len(names) > MOST_BLOCKS:
                raise FastWeightError(f"the model has over {MOST_BLOCKS} blocks; expected at most so many")
        if not names:
            raise FastWeightError(f"layers is {self.layers!r}; expected at least one block")
        return tuple(names)

    def starting_from(self, run: str, **changes: Any) -> "Config":
        """The configuration that trains a Fast Weight Layer on the run of this one.

        Args:
            run: folder of the trained run, which is noted as `start`.
            changes: fields that differ; those of the Fast Weight Layer have their defaults otherwise, all others are
                the run's own.
        """
        own = {f.name: f.default for f in fields(self) if f.name in FAST_FIELDS}
        own |= dict(head="fwl", start=run, train_refresh=TRAIN_REFRESH) | _trained_as_read(changes)
        return type(self)(**(asdict(self) | own | changes))

    @property
    def in_training(self) -> "Config":
        """The configuration of the model while it is trained, whose Fast Weight Layer may learn less often.

        Examples:
            >>> config = Config.of("laptop")
            >>> config.refresh, config.in_training.refresh, Config.of("laptop", refresh=16).in_training.refresh
            (32, 64, 16)
        """
        return replace(self, refresh=self.train_refresh) if self.refresh and self.train_refresh else self

    @property
    def fast_options(self) -> dict[str, Any]:
        """The Fast Weight Layer's arguments, as `FWLBlock` takes them.

        A number divides its losses, so that only the past matters to it: batches and padding change nothing.
        """
        clip = self.fast_clip or None
        if not self.refresh:  # a sum of gradients must decay, or a long text adds up to anything
            return PUBLISHED | dict(clip=clip, decay=self.fast_decay or PUBLISHED["decay"])
        return dict(
            refresh=self.refresh,
            within=self.within,
            normalizer=1.0,
            step_size=self.fast_step / self.dim,
            log_steps=True,
            clip=clip,
            decay=self.fast_decay or None,
        )

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the shape and meaning of the model's weights; a memory or head of another one is refused."""
        names = ("dim", "heads", "ff", "hidden", "head", "fast_hidden", "window", "length")
        how = ("refresh", "within") if self.refresh and self.head == "fwl" else ()
        return {"mixers": list(self.mixers)} | {n: getattr(self, n) for n in (*names, *how)}

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return asdict(self)
