"""Shared fixtures. `--frameworks torch,jax` chooses which frameworks the shared tests run on."""

import functools

import numpy as np
import pytest
from backends import FRAMEWORKS
from layer_backends import flax, framework, keras, quiet  # noqa: F401


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


def pytest_configure(config):
    """One thread per worker: the tests are small, and two workers with two threads each wait for one another."""
    import os

    os.environ.setdefault("OMP_NUM_THREADS", "1")
