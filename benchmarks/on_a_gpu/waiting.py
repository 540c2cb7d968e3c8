"""Import what takes long to import, wait for a line on standard input, then run a module as `python -m` does:

    python -m benchmarks.on_a_gpu.waiting MODULE ARGUMENTS

A job that is started so while others run has its imports behind it when the GPU is its own.
"""

import runpy
import sys
from contextlib import suppress
from importlib import import_module

LONG = ("torch._inductor.compile_fx", "fastweights.bench.memory", "fastweights.models.language_model")
LONG_OF_OTHERS = ("transformers.generation.utils",)  # where it is installed
IMPORTED = "imports done"


def main():
    for name in LONG:
        import_module(name)
    for name in LONG_OF_OTHERS:
        with suppress(ImportError):
            import_module(name)
    print(IMPORTED, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("nobody waits for this job any more")
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
