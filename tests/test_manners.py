"""One vocabulary, one table of models, one way to build a module, one name for a gradient."""

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import fastweights
import fastweights.lm
import fastweights.torch as fw
from fastweights import FastWeightError, core, features, literals
from fastweights.attention import arguments, presets
from fastweights.models.config import MIXERS, Config

PACKAGE = Path(fastweights.__file__).parent

BUILT = {  # every public module of PyTorch -> how a small one is made
    "FastWeightAttention": lambda cls, **to: cls(8, 2, conv=4, decay="learned", gate=True, **to),
    "FastWeightRNN": lambda cls, **to: cls(3, 4, **to),
    "FastWeightProgrammer": lambda cls, **to: cls(3, 4, **to),
    "FWLBlock": lambda cls, **to: cls(4, 7, inputs=3, **to),
    "LanguageModel": lambda cls, **to: cls(Config(dim=8, heads=2, layers="delta,softmax,lstm", head="fwl"), 11, **to),
}


def public_modules():
    """Modules among the public names of fastweights.torch and fastweights.lm."""
    found = {n: getattr(room, n) for room in (fw, fastweights.lm) for n in room.__all__}
    return {n: x for n, x in found.items() if inspect.isclass(x) and issubclass(x, nn.Module)}


def test_every_public_module_is_tried():
    assert public_modules().keys() == BUILT.keys()


@pytest.mark.parametrize("name", BUILT)
def test_every_module_takes_a_device_and_a_dtype(name):
    """Construction on the meta device is free, and every weight is of the dtype that was asked for."""
    made = BUILT[name](public_modules()[name], device="meta", dtype=torch.float64)
    weights = list(made.parameters())
    assert weights
    assert {x.device.type for x in weights} == {"meta"}
    assert {x.dtype for x in weights} == {torch.float64}


@pytest.mark.parametrize("word, table", [
    ("Rule", core.RULES), ("Read", core.READS), ("Norm", features.NORMS), ("LayerNorm", arguments.NORMS),
])  # fmt: skip
def test_types_name_the_words_there_are(word, table):
    assert set(get_args(getattr(literals, word))) == set(table)


def test_norm_is_one_vocabulary():
    """A layer takes every norm of features under the same name, and says what there is when a word is unknown."""
    assert set(features.NORMS) < set(arguments.NORMS)
    assert all(arguments.NORMS[name] == (name, False) for name in features.NORMS)
    x = torch.ones(1, 1, 1, 2)
    for call, known in (
        (lambda: fw.feature_map(x, "relu", norm="L2"), features.NORMS),
        (lambda: fw.fast_weight(x, x, x, norm="L2"), features.NORMS),
        (lambda: fw.FastWeightAttention(4, 1, norm="L2"), arguments.NORMS),
    ):
        expected = re.escape(", ".join(map(repr, known)))
        with pytest.raises(FastWeightError, match=f"norm is 'L2'; expected one of {expected}(:|$)"):
            call()


def test_there_is_one_table_of_models():
    """A name means the same layer to `preset`, to the application and to the lab, which changes sizes alone."""
    from fastweights.lab.tasks import models as lab
    from fastweights.models.mixers import mixer

    assert set(MIXERS) == {*presets.PRESETS, *presets.ALIASES}
    assert set(lab.LAYERS) <= set(MIXERS)
    size = re.compile(r"-\d+$")
    for name in lab.LAYERS:
        layer = fw.FastWeightAttention.preset(name, dim=32, heads=2).config
        application = mixer(name, 32, 2, 8).layer.config  # whose memories have a short convolution each
        assert replace(application, conv=layer.conv) == layer
        ours = lab.mixer(name, 32, 2, conv=layer.conv).layer.config
        for field in ("rule", "norm", "decay", "gate", "beta", "out_norm"):
            assert getattr(ours, field) == getattr(layer, field), (name, field)
        assert size.sub("", ours.features) == size.sub("", layer.features)


def test_presets_are_listed_by_a_public_name():
    for framework in ("torch", "jax", "keras"):  # read, not imported: one of them is enough here
        assert '"PRESETS"' in (PACKAGE / framework / "__init__.py").read_text()
    assert "PRESETS" in fw.__all__
    assert "performer" in fw.PRESETS
    for name in fw.PRESETS:
        assert isinstance(fw.FastWeightAttention.preset(name, dim=8, heads=2), fw.FastWeightAttention)


def without_types(function):
    """Arguments of a function, and "return", that no annotation says the type of."""
    signature = inspect.signature(function)
    arguments = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    found = [p.name for p in arguments if p.annotation is p.empty]
    return found + ["return"] * (signature.return_annotation is signature.empty and function.__name__ != "__init__")


def public_functions():
    """Public functions of PyTorch and of the application, and public methods of their classes, by name."""
    for room in (fastweights, fw, fastweights.lm):
        for name in getattr(room, "__all__", ["debug"]):
            x = getattr(room, name)
            if inspect.isfunction(x):
                yield name, x
            for method, f in vars(x).items() if inspect.isclass(x) and x.__module__.startswith("fastweights") else ():
                f = getattr(f, "__func__", f)
                public = not method.startswith("_") or method in ("__init__", "__call__")
                if public and inspect.isfunction(f) and f.__module__.startswith("fastweights"):
                    yield f"{name}.{method}", f


def test_public_functions_say_their_types():
    found = {name: without_types(f) for name, f in public_functions()}
    assert {"debug", "fast_weight", "FWLBlock.run", "train"} < set(found)
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert without_types(lambda x: x) == ["x", "return"]


# What a gradient is not called: gk, grad_k, k_grad, d_k. It is dk, of whatever is called k.
OTHER_NAMES = re.compile(r"^(g[qkvxwmebS]|grad_\w+|d_[a-z]\w*|\w+_grad)$")
NOT_OURS = {"requires_grad", "needs_input_grad", "zero_grad", "no_grad", "enable_grad", "set_to_none"}


def gradients_called_otherwise(source):
    """Names that a source gives to gradients and that are not spelled dx."""
    stored = {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.arg for n in ast.walk(ast.parse(source)) if isinstance(n, ast.arg)}
    return sorted(name for name in stored - NOT_OURS if OTHER_NAMES.match(name))


@pytest.mark.parametrize("folder", ["torch", "jax", "keras", "hf", "models"])
def test_gradients_are_called_dx(folder):
    found = {p.name: gradients_called_otherwise(p.read_text()) for p in (PACKAGE / folder).rglob("*.py")}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_check_of_names_can_fail():
    assert gradients_called_otherwise("gq = 1\ndef f(grad_out, dx): k_grad = 2") == ["gq", "grad_out", "k_grad"]


PRIVATE = re.compile(r"\btorch(\.\w+)*\._[a-zA-Z]|from torch\S* import _")


def test_private_names_of_pytorch_have_one_home():
    assert PRIVATE.search("x = torch._C._cuda_getDevice()")
    assert not PRIVATE.search("x = torch.add(a, b)")
    homes = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert homes <= {"torch/private.py"}, homes


def laid_out_by_hand(source):
    """Lines with `# fmt: skip` that do not end a table: a name that a module gives a value."""
    tables = {node.end_lineno for node in ast.parse(source).body if isinstance(node, ast.Assign | ast.AnnAssign)}
    return [n for n, line in enumerate(source.splitlines(), 1) if line.endswith("# fmt: skip") and n not in tables]


def test_only_tables_and_kernels_are_laid_out_by_hand():
    assert laid_out_by_hand("f(1,\n  2)  # fmt: skip") == [2]  # the check can fail
    assert laid_out_by_hand("TABLE = [1,\n         2]  # fmt: skip") == []
    found = {str(path.relative_to(PACKAGE)): laid_out_by_hand(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {p: lines for p, lines in found.items() if lines and not p.startswith("torch/kernels/")} == {}


def test_float32_or_wider_has_one_home():
    """In PyTorch: dtypes.py alone says in which dtype sums are kept."""
    own = re.compile(r"promote_types\([^)]*float32|== torch.float64 else torch.float32")
    assert own.search((PACKAGE / "torch" / "dtypes.py").read_text())  # the check can fail
    found = [str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if own.search(p.read_text())]
    assert found == ["torch/dtypes.py"]
