"""`fastweights bench hf`: transformers' own hybrid models, as they come and after `fastweights.hf.accelerate`.

Each family is timed at three places, the two sides in turns: the delta rule alone, the layer around it, and a model of
some layers, which also generates. Nothing is reported unless both give the same numbers and the same tokens.
"""

import copy
import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from fastweights.bench.agree import TOLERANCE, Disagreement
from fastweights.bench.report import new_table
from fastweights.bench.timing import Advance, Call, Clock, CpuClock, CudaClock
from fastweights.core import FastWeightError
from fastweights.hf.accelerate import RULES, accelerate, gated_delta_rule

# How far ours may be from theirs, of the largest number: both sum in other orders.
EXACT = 1e-4  # in float32, of the largest number; in bfloat16 what other benches allow, and twice what theirs errs
PARTS = ("rule", "layer", "model")


class Size(NamedTuple):
    """hidden: width of the model;  heads, width: of the linear layers;  tokens: read;  new: generated."""

    hidden: int
    heads: int
    width: int
    layers: tuple[str, ...]
    tokens: int
    new: int


LAYERS = ("linear_attention", "full_attention")
SIZES = {
    "tiny": Size(64, 4, 16, 2 * LAYERS, tokens=128, new=16),
    "layer": Size(1024, 16, 128, LAYERS, tokens=2048, new=16),
}
SMOKE = {"tiny": Size(32, 2, 8, LAYERS, tokens=20, new=2)}


class Family(NamedTuple):
    """A family of transformers: its module and config there, and the fields of a config that say its linear layers.

    fields: from a size to arguments of the config that only this family has.
    """

    module: str
    config: str
    fields: Callable[[Size], dict[str, Any]]


def _heads(size: Size) -> dict[str, Any]:
    """Fields for the linear layers of the families that name them as Qwen3-Next does."""
    return dict(
        linear_key_head_dim=size.width,
        linear_value_head_dim=size.width,
        linear_num_key_heads=size.heads,
        linear_num_value_heads=size.heads,
    )


def _kimi(size: Size) -> dict[str, Any]:
    """Fields for Kimi Linear: its decay is per channel, and its full attention is compressed to half the width."""
    half = size.width // 2
    return dict(
        linear_head_dim=size.width,
        linear_num_heads=size.heads,
        kv_lora_rank=half,
        qk_rope_head_dim=half,
        qk_nope_head_dim=half,
        v_head_dim=size.width,
        mlp_layer_types=["dense"] * len(size.layers),
    )


FAMILIES = {
    "qwen3-next": Family("qwen3_next", "Qwen3NextConfig", lambda size: _heads(size) | dict(
        head_dim=size.width, num_experts=0, mlp_only_layers=list(range(len(size.layers))))),
    "qwen3.5": Family("qwen3_5", "Qwen3_5TextConfig", lambda size: _heads(size) | dict(head_dim=size.width)),
    "olmo-hybrid": Family("olmo_hybrid", "OlmoHybridConfig", _heads),
    "kimi-linear": Family("kimi_linear", "KimiLinearConfig", _kimi),
}  # fmt: skip


class Times(NamedTuple):
    """Milliseconds of transformers' own and of ours, medians, and the median of their ratios, turn by turn."""

    theirs: float
    ours: float
    ratio: float


class Result(NamedTuple):
    """What was timed of a family, at a size and a part of PARTS.  decode: None where nothing is generated."""

    family: str
    size: str
    part: str
    forward: Times
    both: Times
    decode: Times | None


class ProcessorClock:
    """Processor time of this process: what other programs take does not count. For one thread."""

    def sample(self, call: Call) -> Callable[[], float]:
        """Call it; a function that says the milliseconds of processor time it took."""
        start = time.process_time()
        call()
        elapsed = 1e3 * (time.process_time() - start)
        return lambda: elapsed


def clock(device: str) -> "Clock | ProcessorClock":
    """The GPU's own clock; on a CPU the wall's, or the processor's where there is one thread.

    On a shared machine the wall's clock counts what other programs take; with one thread processor time is the better.
    """
    if device == "cuda":
        return CudaClock()
    return ProcessorClock() if torch.get_num_threads() == 1 else CpuClock()


def build(family: str, size: Size, device: str, dtype: torch.dtype) -> Any:
    """A random model of a family; raises FastWeightError where this transformers has none.

    Weights are drawn anew, since some of transformers' own are left as they were allocated when there is no checkpoint.

    Args:
        family: name in FAMILIES.
        size: of the model.
        device, dtype: where it lives and what its weights are.
    """
    try:
        from transformers import AutoModelForCausalLM, logging

        found = FAMILIES[family]
        config_class = getattr(importlib.import_module(f"transformers.models.{found.module}"), found.config)
    except (ImportError, AttributeError):
        raise FastWeightError(f"transformers has no {family} here; pip install --upgrade transformers") from None
    logging.set_verbosity_error()
    config = config_class(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=len(size.layers),
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        layer_types=list(size.layers),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **found.fields(size),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() == 1 or x.isnan().any():  # decays and norms, some of which are left as they were allocated
                x.copy_(torch.rand_like(x) if "A_log" not in name else torch.randn_like(x))
            else:
                x.copy_(torch.randn_like(x) * x.shape[-1] ** -0.5)
    return model.to(device=device, dtype=dtype)


def run(
    families: Sequence[str], sizes: dict[str, Size], device: str, dtype: torch.dtype, repeats: int, advance: Advance
) -> tuple[list[Result], dict[str, str]]:
    """(results, why a family was left out).

    Args:
        families: names in FAMILIES.
        sizes: {name: Size}.
        device, dtype: of the models.
        repeats: turns; each times both sides.
        advance: moves a progress bar.
    """
    results, left_out = [], {}
    for family in families:
        for name, size in sizes.items():
            try:
                model = build(family, size, device, dtype)
            except FastWeightError as error:
                left_out[family] = str(error)
            else:
                for part in _parts(family, name, size, model, device, dtype, repeats):
                    results.append(part)
                    advance(f"{family}, {name}, {part.part}", 1 / len(PARTS))
                continue
            advance(family, 1)
    return results, left_out


def _parts(
    family: str, name: str, size: Size, model: Any, device: str, dtype: torch.dtype, repeats: int
) -> Iterator[Result]:
    """The delta rule, the layer and the model of one family and size.

    Both sides have the same weights: ours is a copy of the model, whose layers `accelerate` then changes. The rule is
    the one that the family's own code names, found by looking into its forward pass.

    Args:
        family: name of the models, such as qwen3-next.
        name: of the size.
        size: widths, heads and lengths.
        model: a model of transformers with these sizes.
        device, dtype: that it runs on and in.
        repeats: samples of each side.
    """
    ours = copy.deepcopy(model)
    exact = model if dtype == torch.float32 else copy.deepcopy(model).float()
    our_layer = accelerate(ours).layers[0]
    layer, exact_layer = (_first_layer(m) for m in (model, exact))
    T, H, K = size.tokens, size.heads, size.width
    draw = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    code = inspect.unwrap(type(layer).forward).__code__
    module = sys.modules[type(layer).__module__]
    rule = getattr(module, next(n for n in RULES if n in code.co_names and "chunk" in n))
    g = -torch.rand((1, T, H, K) if "kimi" in rule.__name__ else (1, T, H), device=device)
    leaves = [draw(1, T, H, K), draw(1, T, H, K), draw(1, T, H, K), g, draw(1, T, H).sigmoid()]
    own, mine, wide = (
        [x.clone().to(kind).requires_grad_() for x, kind in zip(leaves, kinds, strict=True)]
        for kinds in ([x.dtype for x in leaves],) * 2 + ([torch.float32] * 5,)
    )
    sides = _of_rule(rule, own), _of_rule(gated_delta_rule, mine), _of_rule(rule, wide)
    yield Result(family, name, "rule", *_timed(sides, device, dtype, repeats, f"{family}, rule"), None)

    x = draw(1, T, size.hidden)
    layers = (layer, x), (our_layer, x.clone()), (exact_layer, x.float())
    sides = _sides(_of_layer(module, x.requires_grad_()) for module, x in layers)
    yield Result(family, name, "layer", *_timed(sides, device, dtype, repeats, f"{family}, layer"), None)

    tokens = torch.randint(2, 256, (1, T), device=device)
    sides = _sides(_of_model(m, tokens) for m in (model, ours, exact))
    forward, both = _timed(sides, device, dtype, repeats, f"{family}, model")
    writes = _of_writing(model, tokens[:, :16], size.new), _of_writing(ours, tokens[:, :16], size.new)
    if dtype == torch.float32 and device == "cpu" and not torch.equal(writes[0](), writes[1]()):
        raise Disagreement(f"{family} writes other tokens with our operation. Nothing is reported.")
    yield Result(family, name, "model", forward, both, _in_turns(writes, device, repeats))


Side = tuple[Callable[[], Tensor], list[Tensor]]  # a call, and what it is differentiated by


def _sides(found: Iterator[Side]) -> tuple[Side, Side, Side]:
    """Theirs, ours, and theirs in float32."""
    theirs, ours, exact = found
    return theirs, ours, exact


def _first_layer(model: Any) -> Any:
    with accelerate(model) as found:
        return found.layers[0]


def _of_rule(function: Callable, leaves: list[Tensor]) -> Side:
    """The delta rule alone: q, k, v (1, T, H, K), log decay g and beta."""
    q, k, v, g, beta = leaves
    return lambda: function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0], leaves


def _of_layer(layer: Any, x: Tensor) -> Side:
    """A whole layer, with projections, convolution, norm and gate."""
    return lambda: layer(x), [x, *layer.parameters()]


def _of_model(model: Any, tokens: Tensor) -> Side:
    """A model's forward pass to its logits, without a cache."""
    return lambda: model(tokens, use_cache=False).logits, list(model.parameters())


def _of_writing(model: Any, prompt: Tensor, new: int) -> Callable[[], Tensor]:
    """Greedy generation of `new` tokens after a prompt."""
    return lambda: model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)


def _timed(
    sides: tuple[Side, Side, Side], device: str, dtype: torch.dtype, repeats: int, what: str
) -> tuple[Times, Times]:
    """(forward without gradients, forward+backward) of both, which must give the same.

    Nothing is timed before outputs and gradients agree within TOLERANCE; a faster wrong answer is no answer.

    Args:
        sides: theirs, ours, and theirs in float32, by which both are judged.
        device, dtype: that they run on and in.
        repeats: samples of each side.
        what: is timed, for the message when they disagree.
    """

    theirs, ours, exact = sides

    def both(side: Side) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(side[0]().float().square().mean(), side[1], allow_unused=True)

    for name, run in (("outputs", lambda side: [side[0]()]), ("gradients", lambda side: both(side)())):
        want = run(exact)
        error, allowed = _error(run(ours), want), EXACT
        if dtype != torch.float32:
            allowed = 2 * _error(run(theirs), want) + TOLERANCE[device, "bfloat16"]
        if not error <= allowed:
            raise Disagreement(
                f"{name} of {what} differ by {error:.1e} of the largest number; allowed {allowed:.0e}. "
                "Nothing is reported."
            )
    with torch.no_grad():
        forward = _in_turns((theirs[0], ours[0]), device, repeats)
    return forward, _in_turns((both(theirs), both(ours)), device, repeats)


def _error(got: Sequence[Any], want: Sequence[Any]) -> float:
    """The largest difference over the largest number."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(got, want, strict=True) if b is not None]
    return float(max((a - b).abs().max() for a, b in pairs) / max(b.abs().max() for _, b in pairs))


def _in_turns(calls: tuple[Call, Call], device: str, repeats: int) -> Times:
    """Theirs and ours, in turns, after one call each that does not count.

    In turns, because a machine's speed drifts: the ratio is taken turn by turn and then its median, so a slow minute
    hits both sides of a ratio.
    """
    theirs, ours = calls
    theirs()
    ours()
    timer, turns = clock(device), []
    for turn in range(repeats):
        pair = [theirs, ours] if turn % 2 else [ours, theirs]
        found = {call: timer.sample(call) for call in pair}
        turns.append((found[theirs], found[ours]))
    read = [(a(), b()) for a, b in turns]
    middle = statistics.median
    return Times(middle(a for a, _ in read), middle(b for _, b in read), middle(a / b for a, b in read))


def show(
    results: Sequence[Result],
    left_out: dict[str, str],
    sizes: dict[str, Size],
    device: str,
    dtype: torch.dtype,
    console: Console,
) -> None:
    """Tables of what `run` returned: milliseconds or tokens per second, transformers' own, ours, and how many times.

    Args:
        results, left_out: what `run` returned.
        sizes, device, dtype: what it was given.
        console: of rich, to print on.
    """
    kind = str(dtype).removeprefix("torch.")
    for name, size in sizes.items():
        table = new_table(
            f"{name}: width {size.hidden}, {size.heads} heads of {size.width}, {size.tokens} tokens; "
            f"{kind} on {device}; transformers / ours"
        )
        for heading in ("family", "part", "forward, ms", "", "forward+backward, ms", "", "decode, tokens/s", ""):
            table.add_column(heading, justify="left" if heading in ("family", "part") else "right")
        for r in results:
            if r.size == name:
                cells = [c for t in (r.forward, r.both) for c in (f"{t.theirs:.3g} / {t.ours:.3g}", f"{t.ratio:.2f}x")]
                if r.decode is not None:
                    speeds = (1e3 * size.new / x for x in r.decode[:2])
                    cells += [" / ".join(f"{x:.3g}" for x in speeds), f"{r.decode.ratio:.2f}x"]
                table.add_row(r.family, r.part, *cells)
        console.print(table)
    for why in left_out.values():
        console.print(f"Left out: {why}", markup=False, highlight=False)


def payload(results: Sequence[Result], left_out: dict[str, str], sizes: dict[str, Size], dtype: torch.dtype) -> dict:
    """What goes to the JSON file.

    Returns:
        Milliseconds of both sides and their ratio, by family, size and part.
    """
    timed = [r._asdict() | {n: t and t._asdict() for n, t in zip(r._fields[3:], r[3:], strict=True)} for r in results]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "left_out": left_out,
        "sizes": {n: s._asdict() for n, s in sizes.items()},
        "milliseconds": timed,
    }
