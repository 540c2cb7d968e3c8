"""Which layer of a model first meets NaN or infinity: what each is given and returns is scanned, inside `debug`."""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass

from fastweights.core import FastWeightError

current_layer: ContextVar[str] = ContextVar("layer", default="")  # the one being scanned


def watching(model):
    """The context in which layers of a model are scanned, by the framework's own means."""
    if hasattr(model, "_flatten_layers"):  # Keras; on torch its layers are modules too, whose `forward` nobody calls
        return _wrapped([(layer.path, layer) for layer in model._flatten_layers()], "call")
    if hasattr(model, "register_forward_pre_hook"):
        return _wrapped(list(model.named_modules()), "forward")
    if hasattr(model, "apply") and hasattr(model, "scope"):
        return _watch_flax(model)
    raise FastWeightError(
        f"model is a {type(model).__name__}; expected a torch.nn.Module, a flax.linen.Module or a keras.Layer"
    )


# How a Fast Weight Layer can be entered, beside the call of every framework
ENTRANCES = ("run", "loss", "step", "slow_logits", "slow_loss", "_refreshed_step")


def _scanned(name, layer, call):
    """call, which scans what the layer is given and returns; what is raised inside says which layer it was in."""

    def scanning(*args, **kwargs):
        scan_layer(name, layer, (args, kwargs), "was given")
        token = current_layer.set(_called(name, layer))
        try:
            out = call(*args, **kwargs)
        finally:
            current_layer.reset(token)
        scan_layer(name, layer, out, "returned")
        return out

    return scanning


@contextmanager
def _wrapped(layers, method):
    """Scan every (name, layer) of `layers`: its methods are wrapped until the block ends."""
    before = []
    for name, layer in layers:
        entrances = [n for n in ENTRANCES if hasattr(layer, n)] if type(layer).__name__ == "FWLBlock" else []
        for entrance in (method, *entrances):
            before.append((layer, entrance, vars(layer).get(entrance)))
            object.__setattr__(layer, entrance, _scanned(name, layer, getattr(layer, entrance)))
    try:
        yield
    finally:
        for layer, entrance, own in reversed(before):
            if own is None:
                object.__delattr__(layer, entrance)
            else:  # somebody else had wrapped it
                object.__setattr__(layer, entrance, own)


@contextmanager
def _watch_flax(model):
    """Scan what every module is given and returns, by Flax's own interception of methods."""
    from flax import linen

    def scan(call, args, kwargs, context):
        if context.method_name not in ("__call__", *ENTRANCES):
            return call(*args, **kwargs)
        return _scanned("/".join(context.module.path), context.module, call)(*args, **kwargs)

    with linen.intercept_methods(scan):
        yield


def _called(name, layer):
    return f"{f'layer {name}' if name else 'the model'} ({type(layer).__name__})"


def scan_layer(name, layer, tree, did):
    """Raise where an array in what a layer was given, or returned, holds NaN or infinity.

    Args:
        name: of the layer in the model.
        layer: whose class is named in the message.
        tree: arrays, tuples and dicts of them.
        did: what the layer did with them, for the message.
    """
    import numpy as np

    for x in _arrays(tree):
        if hasattr(x, "is_floating_point"):  # torch: without copying it
            if not x.is_floating_point() or bool(x.isfinite().all()):
                continue
            x = x.detach().double().cpu()
        try:
            x = np.asarray(x)
        except Exception:  # no value yet: it is being compiled
            continue
        bad = ~np.isfinite(x) if x.dtype.kind == "f" else np.zeros(0, bool)
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise FastWeightError(
                f"{_called(name, layer)} {did} {x[at]} at {at} of {x.shape}; expected finite numbers: no "
                f"layer before it met any other ({int(bad.sum())} such values)"
            )


def _arrays(tree):
    """The arrays in tuples, lists, dicts and dataclasses."""
    if isinstance(tree, (tuple, list)):
        for x in tree:
            yield from _arrays(x)
    elif isinstance(tree, dict):
        yield from _arrays(list(tree.values()))
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from _arrays([getattr(tree, f.name) for f in fields(tree)])
    elif hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield tree
