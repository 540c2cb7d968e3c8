"""Without a GPU, every file about kernels runs once more in Triton's interpreter: two processes, alike in length."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from covering import covering
from interpreter import elsewhere, run_in_the_interpreter

FILES = [
    f for f in sorted(Path(__file__).parent.glob("test_kernels*.py")) if "from interpreter import" in f.read_text()
]
LONGEST = [f for f in FILES if f.stem == "test_kernels"]


@elsewhere
@pytest.mark.long
@pytest.mark.parametrize("files", [LONGEST, [f for f in FILES if f not in LONGEST]], ids=["memory", "others"])
def test_everything_in_the_interpreter(files):
    run_in_the_interpreter(*files)


class Test:
    """As pytest has them."""

    __test__ = False

    def __init__(self, callspec):
        self.callspec = callspec


def test_what_is_chosen_of_a_grid_covers_it():
    """Every length, and every pair of values of two of the switches, in fewer cells than there are."""
    grid = dict(length=range(5), rule=["delta", "sum"], read=["after", "before"], decay=[True, False])
    cells = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    tests = [Test(SimpleNamespace(params=cell)) for cell in cells]
    chosen = [test.callspec.params for test in covering(tests)]
    assert {cell["length"] for cell in chosen} == set(grid["length"])
    for a, b in (("rule", "read"), ("rule", "decay"), ("read", "decay")):
        assert {(cell[a], cell[b]) for cell in chosen} == set(product(grid[a], grid[b]))
    assert len(chosen) < 8 < len(cells)
