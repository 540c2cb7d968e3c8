"""`fastweights bench hf`: transformers' own hybrid models, as they come and after `fastweights.hf.accelerate`.

Each family is timed at three places, the two sides in turns: the delta rule alone, the layer around it, and a model of
some layers, which also generates. Nothing is reported unless both give the same numbers and the same tokens.
"""

import copy
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.bench.agree import TOLERANCE, Disagreement
from fastweights.bench.hf_models import Size, build
from fastweights.bench.hf_results import Result, Times
from fastweights.bench.timing import Advance, Call, clock
from fastweights.core import FastWeightError
from fastweights.hf.accelerate import RULES, accelerate, gated_delta_rule

# How far ours may be from theirs, of the largest number: both sum in other orders.
EXACT = 1e-4  # in float32, of the largest number; in bfloat16 what other benches allow, and twice what theirs errs
PARTS = ("rule", "layer", "model")


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
