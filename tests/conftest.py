"""Shared fixtures. `--frameworks torch,jax` chooses which frameworks the shared tests run on."""

import functools
import os
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from backends import FRAMEWORKS
from layer_backends import flax, framework, keras, quiet  # noqa: F401

if os.environ.get("KERAS_BACKEND") == "tensorflow":
    import torch._dynamo  # noqa: F401 - loads Triton, whose library aborts when it comes after TensorFlow's


def pytest_addoption(parser):
    parser.addoption("--frameworks", default="torch,jax", help="comma-separated: torch, jax, keras")


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.getoption("--frameworks").split(","), indirect=True)


@functools.cache
def _open(name):
    return FRAMEWORKS[name]()


@pytest.fixture
def backend(request):
    return _open(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def pytest_collection_modifyitems(config, items):
    """Keras on TensorFlow and on JAX, which trace and compile, takes of each grid what `covering` chooses.

    On torch Keras runs all of them, and the code above the backend is the same.
    """
    if config.getoption("--frameworks") != "keras" or os.environ.get("KERAS_BACKEND") == "torch":
        return
    grids = {}
    for item in items:
        if not hasattr(item, "callspec") or item.callspec.params.get("framework") != "jax":
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
    chosen = {item for grid in grids.values() for item in covering(grid)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def covering(grid):
    """Few tests of one function with every value of every parameter, and every pair of values of two switches.

    A switch is a parameter of two values. Each test adds as much as it can, of values that were seldom had so far.
    """
    cells = {i: {(n, repr(x)) for n, x in i.callspec.params.items()} for i in grid if hasattr(i, "callspec")}
    values = Counter(name for name, _ in set().union(*cells.values()))
    for cell in cells.values():
        cell |= set(combinations(sorted(x for x in cell if values[x[0]] == 2), 2))
    missing, had = set().union(*cells.values()), Counter()
    chosen = [item for item in grid if item not in cells]
    while missing:
        chosen.append(max(cells, key=lambda item: (len(cells[item] & missing), -sum(had[x] for x in cells[item]))))
        missing -= cells[chosen[-1]]
        had.update(cells[chosen[-1]])
    return chosen


def pytest_configure(config):
    """One thread per worker: the tests are small, and two workers with two threads each wait for one another."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
