"""Shared fixtures. `--frameworks torch,jax` chooses which frameworks the shared tests run on."""

import functools
import os

import numpy as np
import pytest
from backends import FRAMEWORKS
from covering import covering
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
    """Where tests are slow, of each grid what `covering` chooses: the interpreter, Keras on TensorFlow and on JAX.

    On a GPU kernels run all of their grids. So does Keras on torch, and the code above the backend is the same.
    """
    traced = config.getoption("--frameworks") == "keras" and os.environ.get("KERAS_BACKEND") != "torch"
    if not traced and os.environ.get("TRITON_INTERPRET") != "1":
        return
    grids = {}
    for item in items:
        if not hasattr(item, "callspec") or item.callspec.params.get("framework") != "jax":
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
    chosen = {item for grid in grids.values() for item in covering(grid)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_configure(config):
    """One thread per worker: the tests are small, and two workers with two threads each wait for one another."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
