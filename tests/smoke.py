"""What `make release` does with the installed wheel, outside the checkout: imports, the first example, the program."""

import importlib.metadata
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fastweights

CHECKOUT = Path(__file__).parent.parent


def program(*arguments):
    """What `fastweights` with these arguments prints."""
    found = Path(sys.executable).parent / "fastweights"
    return subprocess.run([found, *arguments], check=True, capture_output=True, text=True).stdout


def main():
    at = Path(fastweights.__file__)
    assert CHECKOUT / "fastweights" not in at.parents, f"{at} is the checkout's; expected the wheel's"
    assert importlib.metadata.version("fastweights") == fastweights.__version__
    assert (at.parent / "py.typed").exists()
    assert fastweights.__version__ in program("--version")
    assert "What to do next" in program()
    assert "python" in program("info")
    if find_spec("torch"):
        import torch

        import fastweights.torch as fw

        keys = torch.eye(4)[[0, 1, 2, 0]].reshape(1, 4, 1, 4)
        _, memory = fw.fast_weight(keys, keys, torch.tensor([1.0, 2.0, 3.0, 9.0]).reshape(1, 4, 1, 1))
        assert memory.flatten().tolist() == [9.0, 2.0, 3.0, 0.0]
        y, _ = fw.FastWeightAttention(16, heads=2)(torch.randn(1, 5, 16))
        y.sum().backward()
    print(
        f"fastweights {fastweights.__version__} works from {at.parent}" + ("" if find_spec("torch") else " (no torch)")
    )


if __name__ == "__main__":
    main()
