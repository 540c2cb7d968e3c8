"""Shared fixtures. `--frameworks torch,jax` chooses which frameworks the shared tests run on."""

import functools
import gc
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
    """What is slow to compile or to interpret takes of each grid what `covering` chooses, and nothing but grids is cut.

    All cells run on PyTorch, those that are of other frameworks alone in Keras on torch, and those of kernels on a GPU.
    """
    alone = config.getoption("--frameworks") == "keras"
    slow = (alone and os.environ.get("KERAS_BACKEND") != "torch") or os.environ.get("TRITON_INTERPRET") == "1"
    kept, grids = set(), {}
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        of_jax = "jax" in (given.get("backend"), given.get("framework"))
        if of_jax and alone:
            continue  # another process's
        if of_jax or slow:
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
        else:
            kept.add(item)
    kept.update(item for grid in grids.values() for item in covering(grid))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """What was imported stays: garbage is looked for among what tests make, not in a million objects each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # for libraries that complain of what is left at the end


def pytest_configure(config):
    """One thread per worker: the tests are small, and two workers with two threads each wait for one another.

    On JAX compiling is most of the time, so it optimises little, except where test_jax.py asks it to, and makes its
    code as it did before its fusion emitters, in one part: a layer with its gradients then compiles five times as fast.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    plain = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", plain)
