"""Where kernels run: on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from fastweights.torch import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(DEVICE == "cpu" and not kernels.INTERPRETED, reason="needs CUDA or Triton's interpreter")
elsewhere = pytest.mark.skipif(DEVICE == "cuda" or kernels.INTERPRETED, reason="the tests below run by themselves")


def spare_the_interpreter_needless_work():
    """More than twice as fast, with the same numbers: of what Triton's interpreter does, some things are for nothing.

    - At every call inside a kernel, also of `tl.sum`, it patches its language. Once in a launch is the same, since what
      a call has patched stays so until the launch ends.
    - It looks for integers that overflow, and drops what it finds, because it is not in its mode for debugging.
    - What follows from a shape or a type it works out anew for every tensor.
    """
    from triton.runtime import interpreter

    tl, launch, patched, visible = interpreter.tl, interpreter.GridExecutor.__call__, set(), {}

    def launch_and_forget(executor, *given, **named):
        patched.clear()
        return launch(executor, *given, **named)

    def call(function, *given, **named):
        fn = function.fn
        if fn not in visible:  # the modules that a call patches
            visible[fn] = frozenset(id(m) for m in fn.__globals__.values() if m is tl or m is tl.core)
        if visible[fn] not in patched:
            interpreter._patch_lang(fn)
            patched.add(visible[fn])
        try:
            return function.rewrite()(*given, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = launch_and_forget, call
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    remember_shapes_and_types(tl.core, interpreter)


def remember_shapes_and_types(core, interpreter):
    blocks, arrays, point = {}, {}, (core.constexpr(1), core.tuple([]))
    check, unwrap, array_type = core.block_type.__init__, core._unwrap_if_constexpr, interpreter._get_np_dtype

    def block_type(self, element_ty, shape):
        key = element_ty.name, *map(unwrapped, shape)  # older versions of Triton hand over constants
        if key not in blocks:
            check(self, element_ty, shape)
            of_tensor = core.constexpr(self.numel), core.tuple([core.constexpr(s) for s in self.shape])
            blocks[key] = self.shape, self.numel, self.name, of_tensor
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.of_tensor = blocks[key]

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else point

    def unwrapped(x):
        kind = type(x)
        return x if kind is int or kind is core.tensor else x.value if kind is core.constexpr else unwrap(x)

    def array_type_of(kind):
        if kind.name not in arrays:
            arrays[kind.name] = array_type(kind)
        return arrays[kind.name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core._unwrap_if_constexpr, interpreter._get_np_dtype = unwrapped, array_type_of


if kernels.INTERPRETED:
    spare_the_interpreter_needless_work()


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory is NaN, a kernel's scratch of bytes too, so that an element left unwritten cannot pass."""
    from fastweights.torch.kernels.plan import Plan

    def filled(x):
        if x.dtype == torch.uint8:
            return x.fill_(255)  # four bytes of it are a NaN of float32, two one of bfloat16
        return x.fill_(float("nan")) if x.dtype.is_floating_point else x

    def allocate(plan, given, _make=Plan._allocate):
        tensors = _make(plan, given)
        for place, *_ in plan.allocations:
            filled(tensors[place])
        return tensors

    monkeypatch.setattr(Plan, "_allocate", allocate)
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _make=make, **kw: filled(_make(*a, **kw)))


def run_in_the_interpreter(*files):
    """All tests of these files, in one process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
