"""Every example in a docstring of the package runs, and prints what it says."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALONE = {"jax": {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}}  # its settings hold for a whole process
ELSEWHERE = {"keras"}  # on each of its backends: test_keras.py


def examples():
    """Names of the modules that hold an example."""
    for path in sorted((ROOT / "fastweights").rglob("*.py")):
        if re.search(r"^\s*>>> ", path.read_text(), re.M):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted, f"{module} has >>> but no example that doctest finds"
    assert not result.failed, module


def framework(module):
    return module.split(".")[1]


@pytest.mark.parametrize("module", [m for m in examples() if framework(m) not in {*ALONE, *ELSEWHERE}])
def test_examples(module, tmp_path, monkeypatch):
    if framework(module) == "hf":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # where examples write
    run(module)


@pytest.mark.parametrize("name", ALONE)
def test_examples_of(name, tmp_path):
    pytest.importorskip(name)
    modules = [m for m in examples() if framework(m) == name]
    assert modules
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_doctests as t\n"
    code += f"for module in {modules}: t.run(module)"
    env = os.environ | ALONE[name] | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_example_fails(tmp_path, monkeypatch):
    (tmp_path / "wrong_example.py").write_text('"""A sum.\n\n>>> 1 + 1\n3\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match="wrong_example"):
        run("wrong_example")
