"""Without a GPU, every file about kernels runs once more in Triton's interpreter: two processes, alike in length."""

from pathlib import Path

import pytest
from interpreter import elsewhere, run_in_the_interpreter

FILES = [
    f for f in sorted(Path(__file__).parent.glob("test_kernels*.py")) if "from interpreter import" in f.read_text()
]
LONGEST = [f for f in FILES if f.stem == "test_kernels"]


@elsewhere
@pytest.mark.parametrize("files", [LONGEST, [f for f in FILES if f not in LONGEST]], ids=["memory", "others"])
def test_everything_in_the_interpreter(files):
    run_in_the_interpreter(*files)
