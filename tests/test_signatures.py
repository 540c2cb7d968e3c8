"""The three frameworks are spelled alike: public names, and the parameters of each, in order, defaults and words."""

import dataclasses
import inspect
from importlib import import_module
from typing import Literal, get_args, get_origin

import pytest

pytest.importorskip("torch")

# What belongs to a framework: where arrays live, how its modules are named and called, and what it alone has.
OWN = {
    "torch": {"device", "dtype", "out_state", "redraw", "slow"},
    "jax": {"dtype", "param_dtype", "parent", "name", "variables"},
    "keras": {"dtype", "name", "trainable", "training", "redraw"},
}
FUNCTIONS = ["fast_weight", "feature_map", "make_labels"]
CLASSES = ["FastWeightAttention", "FastWeightRNN", "FastWeightProgrammer", "FWLBlock"]
CALL = {"torch": "forward", "jax": "__call__", "keras": "call"}
METHODS = {
    "FastWeightAttention": ["preset", "step", "init_state"],
    "FWLBlock": ["run", "loss", "step", "init_state", "slow_logits"],
}


def words(annotation):
    """The words that an annotation allows, those of a Literal anywhere in it; none where any string will do."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in words(part))


def parameters(function, framework):
    """(name, kind, default, words) of what is not the framework's own."""
    own = OWN[framework] - (set() if function.__name__ == "__init__" else {"name"})
    found = []
    for p in inspect.signature(function).parameters.values():
        if p.name not in ("self", "cls", *own):
            default = p.default
            if isinstance(default, dataclasses.Field):
                default = default.default
            found.append((p.name, p.kind.name, repr(default), words(p.annotation)))
    return found


def public(framework):
    """Every public signature of the framework, by its name."""
    fw = import_module(f"fastweights.{framework}")
    found = {name: parameters(getattr(fw, name), framework) for name in FUNCTIONS}
    for name in CLASSES:
        cls = getattr(fw, name)
        found[name] = parameters(cls.__init__, framework)
        found[f"{name}()"] = parameters(getattr(cls, CALL[framework]), framework)
        for method in METHODS.get(name, []):
            found[f"{name}.{method}"] = parameters(getattr(cls, method), framework)
    return found


@pytest.mark.parametrize("framework", ["jax", "keras"])
def test_signatures_are_those_of_torch(pytestconfig, framework):
    if framework == "keras" and "keras" not in pytestconfig.getoption("--frameworks").split(","):
        pytest.skip("test_keras.py runs it in another process: Keras takes one backend per process")
    pytest.importorskip({"jax": "flax", "keras": "keras"}[framework])
    here, there = public("torch"), public(framework)
    assert here.keys() == there.keys()
    for name in here:
        assert there[name] == here[name], name


@pytest.mark.parametrize("argument", ["rule", "read", "norm", "method", "normalizer", "within"])
def test_arguments_that_take_words_say_which(argument):
    """Wherever an argument has this name, its type is a Literal: a type checker knows a word that is wrong."""
    found = [p[3] for signature in public("torch").values() for p in signature if p[0] == argument]
    assert found
    assert all(found), argument


def test_the_comparison_can_fail():
    assert parameters(lambda a, *, b=1: 0, "torch") != parameters(lambda a, *, b=2: 0, "torch")
    assert parameters(lambda a, b: 0, "torch") != parameters(lambda b, a: 0, "torch")
    assert parameters(lambda a, device=None: 0, "torch") == parameters(lambda a: 0, "torch")

    def first(a: Literal["x", "y"] | None): ...
    def second(a: Literal["x"] | None): ...

    assert parameters(first, "torch") != parameters(second, "torch")
