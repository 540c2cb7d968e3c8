"""From the description of a method to what PyTorch needs of it: operators, fake kernels, autograd, vmap.

A method computes `fast_weight` by a forward and a backward pass of its own. `add` registers both as operators, so that
torch.compile, export and vmap know them; `run` calls them with the gradient attached. Nothing here knows a rule or a
switch: those are in the Spec, which an operator takes as one line of text, and the arrays are one list.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights import chunk_form
from fastweights.core import ARRAYS, FastWeightError, Inputs, Spec
from fastweights.torch import hand_gradients
from fastweights.torch.dtypes import accumulation_dtype, outside_autocast
from fastweights.torch.packing import whole_numbers
from fastweights.torch.private import has_modes, is_forward, is_transformed, is_watched

PLAIN = (Tensor, torch.nn.Parameter)
GIVEN = ARRAYS + 1  # arrays of Inputs that methods see: the differentiable ones and cu_seqlens


class Method(NamedTuple):
    """How to compute o and the final state of an Inputs (mask applied) for a Spec.

    Attributes:
        name: of its operator, fastweights::NAME.
        refuses: refuses(inputs, spec), why it cannot, or None.
        layout: layout(inputs, spec), a number above 0 that says how the forward pass shall arrange what it saves.
        saves: saves(inputs, spec, layout), shapes and dtypes of what it then saves, from shapes alone.
        forward: forward(inputs, spec, layout) is (o, state, saved); layout 0: nothing is saved.
        backward: backward(do, dstate, inputs, saved, spec), gradients as an Inputs; dstate may be None.
        maps: maps(inputs, spec), whether it maps q and k itself, as spec.features and spec.norm say.
    """

    name: str
    refuses: Callable[[Inputs, Spec], str | None]
    layout: Callable[[Inputs, Spec], int]
    saves: Callable[[Inputs, Spec, int], list[tuple[Any, torch.dtype]]]
    forward: Callable[[Inputs, Spec, int], tuple[Tensor, Tensor, list[Tensor]]]
    backward: Callable[[Tensor, Tensor | None, Inputs, list[Tensor], Spec], Inputs]
    maps: Callable[[Inputs, Spec], bool] = lambda inputs, spec: False


class Operators(NamedTuple):
    """A method and its two registered operators."""

    method: Method
    forward: Any
    backward: Any


ADDED: dict[str, Operators] = {}
library = torch.library.Library("fastweights", "FRAGMENT")
_specs: dict[str, Spec] = {}


def register(name: str, schema: str, run: Callable, fake: Callable) -> Any:
    """run as the operator fastweights::name. `torch.library.custom_op` would add 0.1 ms to every call.

    Args:
        name: after "fastweights::".
        schema: types of arguments and results, as torch.library writes them.
        run: what it does.
        fake: the same for tensors without values, for compilers: empty tensors of the right shapes.
    """
    library.define(name + schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastweights::{name}", fake, lib=library)
    return getattr(torch.ops.fastweights, name).default


def register_typed(run: Callable, fake: Callable, changes: tuple[str, ...] = ()) -> Any:
    """`register` under the function's own name, with the schema of its annotations; it writes into `changes`."""
    return register(run.__name__, torch.library.infer_schema(run, mutates_args=changes), run, fake)


def add(method: Method) -> Method:
    """Register the operators fastweights::NAME and fastweights::NAME_backward of a method.

    Arrays go in as one list and the Spec as text, since the schema of an operator knows no tuples of ours.
    """

    def forward(inputs, spec, layout):
        o, state, saved = method.forward(Inputs(*inputs), of_text(spec), layout)
        return [o, state, *saved]

    def forward_fake(inputs, spec, layout):
        inputs = Inputs(*inputs)
        q, v, spec = inputs.q, inputs.v, of_text(spec)
        saved = method.saves(inputs, spec, layout) if layout else []
        return [
            torch.empty_like(v, memory_format=torch.contiguous_format),
            q.new_empty(state_shape(inputs, spec), dtype=accumulation_dtype(q.dtype)),
            *(q.new_empty(shape, dtype=dtype) for shape, dtype in saved),
        ]

    def backward(do, dstate, inputs, saved, spec):
        grads = _backward(method, do, dstate, Inputs(*inputs), saved, of_text(spec))
        return [do.new_empty(0) if g is None else g for g in grads[:ARRAYS]]  # an operator cannot return None

    def backward_fake(do, dstate, inputs, saved, spec):
        return [
            do.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in tuple(inputs)[:ARRAYS]
        ]

    ADDED[method.name] = Operators(
        method,
        register(method.name, "(Tensor?[] inputs, str spec, int layout) -> Tensor[]", forward, forward_fake),
        register(
            f"{method.name}_backward",
            "(Tensor do, Tensor? dstate, Tensor?[] inputs, Tensor[] saved, str spec) -> Tensor[]",
            backward,
            backward_fake,
        ),
    )
    return method


def run(method: Method, inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """(o, state) by a method that was added, with its gradient where one may be asked for.

    Three ways, from cheap to general: the method's own function where nobody differentiates or traces; the same inside
    an autograd function; and registered operators, with their own autograd function, where someone looks on. Forward
    mode, for which nothing is written by hand, goes through the plain form.
    """
    if is_forward():
        with outside_autocast(inputs.q):
            return plain(inputs, spec)
    # Nobody differentiates and nobody traces: the function itself, which is the cheapest.
    gradient, watched = needs_gradient(inputs), is_watched()
    if not gradient and not watched:
        o, state, _ = method.forward(inputs, spec, 0)
        return o, state
    arrays = tuple(inputs)[:GIVEN]
    if not watched and _is_plain(arrays):
        return _apply_direct(method, spec, *arrays)
    layout = method.layout(inputs, spec) if gradient or is_transformed() else 0
    q, k, v, *rest = arrays
    if torch.compiler.is_compiling():  # torch.compile refuses one tensor in two places, such as q = k
        k, v = k.view_as(k), v.view_as(v)
        if not gradient:  # torch.compile takes an autograd function for one with a context where gradients are off
            o, state, *_ = ADDED[method.name].forward([q, k, v, *rest], spec.as_text(), 0)
            return o, state
    o, state, *_ = FastWeight.apply(method.name, spec.as_text(), layout, q, k, v, *rest)
    return o, state


def needs_gradient(inputs: Inputs) -> bool:
    """Whether autograd records an operation on these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tuple(inputs)[:ARRAYS])


def state_shape(inputs: Inputs, spec: Spec) -> tuple[Any, ...]:
    """(sequences, H, K, V) of the memory of these inputs; K is the width of the features."""
    from fastweights.features import parse

    B, _, H, K = inputs.q.shape
    K = parse(spec.features).width(K) if spec.maps else K
    return (B if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1), H, K, inputs.v.shape[-1]


def of_text(text):
    """The Spec that an operator was given as text."""
    if torch.compiler.is_compiling():  # a traced pass must not change what lies outside of it, nor depend on it
        return Spec.parse(text)
    spec = _specs.get(text)
    if spec is None:
        spec = _specs[text] = Spec.parse(text)
    return spec


def _backward(method, do, dstate, inputs, saved, spec):
    """The method's gradients; where nothing was saved, its forward pass is run again first."""
    if not saved:  # a transform hid that a gradient would be asked for
        saved = method.forward(inputs, spec, method.layout(inputs, spec))[2]
    return method.backward(do, dstate, inputs, saved, spec)


def _is_plain(tensors):
    """Whether nobody looks on: then the function behind an operator is called, 20 us cheaper than the operator."""
    return not has_modes() and all(x is None or type(x) in PLAIN for x in tensors)


def _gradients(name, spec, tensors, do, dstate):
    """Gradients of the arrays of Inputs, None for those that were absent, as one that differentiates once gets them.

    Three ways, as in `run`: a function that can be differentiated once more, where second derivatives are asked for;
    the operator, where someone looks on; else the method's own function.

    Args:
        name, spec: of the method and the call.
        tensors: the arrays, and what the forward pass saved.
        do, dstate: upstream gradients, None where there are none.
    """
    arrays, saved = tensors[:GIVEN], list(tensors[GIVEN:])
    do = torch.zeros_like(arrays[2]) if do is None else do
    if torch.is_grad_enabled():  # second derivatives
        if dstate is None:
            dstate = do.new_zeros(state_shape(Inputs(*arrays), spec), dtype=accumulation_dtype(do.dtype))
        grads = FastWeightBackward.apply(name, spec.as_text(), saved, do, dstate, *arrays)
    elif not is_watched() and _is_plain((do, *arrays)):
        grads = _backward(ADDED[name].method, do, dstate, Inputs(*arrays), saved, spec)
    else:
        grads = ADDED[name].backward(do, dstate, list(arrays), saved, spec.as_text())
    return [None if x is None else g for x, g in zip(arrays[:ARRAYS], grads, strict=False)]


class Direct(torch.autograd.Function):
    """A method with its gradient, where nobody looks on: (o, state). What is saved never leaves it."""

    @staticmethod
    def forward(ctx, method, spec, *arrays):
        """(o, state) by the method's own function, which also gives what its backward pass needs."""
        inputs = Inputs(*arrays)
        o, state, saved = method.forward(inputs, spec, method.layout(inputs, spec))
        ctx.name, ctx.spec = method.name, spec
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, *saved)
        return o, state

    @staticmethod
    def backward(ctx, do, dstate):
        """Gradients of the arrays; none of the method, the Spec and cu_seqlens."""
        return None, None, *_gradients(ctx.name, ctx.spec, ctx.saved_tensors, do, dstate), None


# `Function.apply` binds arguments to defaults for the sake of transforms; where none look on, its base will do.
_apply_direct = super(torch.autograd.Function, Direct).apply


class FastWeight(torch.autograd.Function):
    """A method's operator with its gradient, where compilers or transforms look on: (o, state, *saved).

    `vmap` has its rule here too: the mapped axis joins the batch, which changes no result.
    """

    @staticmethod
    def forward(name, spec, layout, *arrays):
        """(o, state, *saved) by the operator."""
        return tuple(ADDED[name].forward(list(arrays), spec, layout))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs and what the method saved for its backward pass, which no caller may differentiate."""
        ctx.name, ctx.spec, _, *arrays = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*arrays, *output[2:])

    @staticmethod
    def backward(ctx, do, dstate, *_):
        """Gradients of the arrays; none of the name, the text, the layout and cu_seqlens."""
        grads = _gradients(ctx.name, of_text(ctx.spec), ctx.saved_tensors, do, dstate)
        return None, None, None, *grads, None

    @staticmethod
    def vmap(info, in_dims, name, spec, layout, *arrays):
        """The mapped axis joins the batch. Nothing is saved: that would mix the mapped axis with the batch."""
        call = lambda *x: FastWeight.apply(name, spec, 0, *x)  # noqa: E731 - what is saved mixes batch and steps
        return _fold(call, info.batch_size, in_dims[3:], arrays)


class FastWeightBackward(torch.autograd.Function):
    """A method's gradient with a gradient of its own, for second derivatives: that of `plain`, the same function."""

    @staticmethod
    def forward(name, spec, saved, do, dstate, *arrays):
        """The method's gradients, by its operator."""
        return tuple(ADDED[name].backward(do, dstate, list(arrays), saved, spec))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the plain form is computed from: the upstream gradients and the inputs."""
        _, ctx.spec, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *second):
        """Gradients of the gradients: those of the plain form, recomputed under autograd."""
        do, dstate, *arrays, cu_seqlens = ctx.saved_tensors
        wanted = [i for i, x in enumerate(arrays) if x is not None]
        differentiate = _second_transformed if is_transformed() else _second
        found = differentiate(of_text(ctx.spec), do, dstate, arrays, cu_seqlens, tuple(second[i] for i in wanted))
        of = dict(zip(wanted, found[2:], strict=True))
        return None, None, None, *found[:2], *(of.get(i) for i in range(ARRAYS)), None

    @staticmethod
    def vmap(info, in_dims, name, spec, saved, *tensors):
        call = lambda *x: FastWeightBackward.apply(name, spec, [], *x)  # noqa: E731 - the backward computes it again
        return _fold(call, info.batch_size, in_dims[3:], tensors)


def _second(spec, do, dstate, arrays, cu_seqlens, second):
    """Gradients of do, dstate and the arrays that are there, given those of the arrays' own gradients.

    The first gradient once more, of the plain form, so that autograd can differentiate it.
    """
    with torch.enable_grad():
        ups = [_node(x) for x in (do, dstate)]
        copies: list[Any] = [None if x is None else _node(x) for x in arrays]
        asked = [x for x in copies if x is not None]
        outputs = plain(Inputs._make([*copies, cu_seqlens, None]), spec)
        first = torch.autograd.grad(outputs, asked, ups, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(first, [*ups, *asked], second, create_graph=True, materialize_grads=True)


def _second_transformed(spec, do, dstate, arrays, cu_seqlens, second):
    """`_second` under a transform of torch.func, which allows no requires_grad_: by its own functions."""

    def first(do, dstate, *given):
        def forward(*given):
            left = iter(given)
            return plain(Inputs._make([*(None if x is None else next(left) for x in arrays), cu_seqlens, None]), spec)

        return torch.func.vjp(forward, *given)[1]((do, dstate))

    return torch.func.vjp(first, do, dstate, *(x for x in arrays if x is not None))[1](second)


def _node(x):
    """x as a node of its own in the graph, so that a gradient for it alone can be asked."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _fold(call, n, in_dims, arrays):
    """The vmap rule of both: the mapped axis joins the batch; packed rows, which have no batch, run in turn.

    arrays: what is mapped, cu_seqlens last.
    """
    *arrays, packed = arrays
    if in_dims[len(arrays)] is not None:
        raise FastWeightError("cu_seqlens is mapped by vmap; expected one packing for all: its values decide shapes")
    for i, (x, d) in enumerate(zip(arrays, in_dims, strict=False)):
        if x is not None:
            arrays[i] = x.unsqueeze(0).expand(n, *x.shape) if d is None else x.movedim(d, 0)
    if packed is None:
        out = call(*(None if x is None else x.flatten(0, 1) for x in arrays), None)
        out = tuple(x.unflatten(0, (n, -1)) if x.dim() > 1 else x for x in out)
    else:
        runs = [call(*(None if x is None else x[j] for x in arrays), packed) for j in range(n)]
        out = tuple(torch.stack(x) if x[0].dim() > 1 else x[0] for x in zip(*runs, strict=True))
    return out, tuple(0 if x.dim() > 1 else None for x in out)


def plain(inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """(o, state) in differentiable operators, chunk after chunk: what second derivatives go through.

    Slower than a method and heavier on memory, but autograd can differentiate it as often as it likes.
    """
    if spec.maps:
        q, k = (map_plainly(x, spec) for x in (inputs.q, inputs.k))
        inputs, spec = inputs.but(q=q, k=k), spec.without_maps()
    q, v = inputs.q, inputs.v
    wide = accumulation_dtype(q.dtype)
    state = q.new_zeros(state_shape(inputs, spec), dtype=wide) if inputs.state is None else inputs.state
    if inputs.cu_seqlens is not None:
        parts = [
            plain(inputs.map_tokens(lambda x: x[:, a:b]).but(state=state[n : n + 1], cu_seqlens=None), spec)  # noqa: B023
            for n, (a, b) in enumerate(pairwise(whole_numbers(inputs.cu_seqlens, "cu_seqlens")))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    beta = torch.ones_like(q[..., 0]) if inputs.beta is None else inputs.beta
    log_decay = torch.zeros_like(q[..., 0]) if inputs.log_decay is None else inputs.log_decay
    heads_first = inputs.but(beta=beta, log_decay=log_decay).map_tokens(lambda x: x.to(wide).transpose(1, 2))
    S, outputs, C = state, [v[:, :0].to(wide).transpose(1, 2)], spec.chunk_size or 64
    with torch.device(q.device):
        for a in range(0, q.shape[1], C):
            S, o = chunk_form.chunk(S, heads_first.map_tokens(lambda x: x[:, :, a : a + C]), spec, torch)  # noqa: B023
            outputs.append(o)
    return torch.cat(outputs, 2).transpose(1, 2).to(v.dtype), S


def map_plainly(x: Tensor, spec: Spec) -> Tensor:
    """The features of x that spec asks for, in PyTorch's own operators."""
    from fastweights.features import parse

    wide = x.to(accumulation_dtype(x.dtype))
    return parse(spec.features).apply(wide, torch, hand_gradients, norm=spec.norm).to(x.dtype)
