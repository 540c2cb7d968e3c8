"""A few cells of a grid that still hold all of its values."""

from collections import Counter
from itertools import combinations


def covering(grid):
    """Few tests of one function with every value of every parameter, and every pair of values of two switches.

    A switch is a parameter of two values. Each test adds as much as it can, of values that were seldom had so far.
    """
    cells = {i: {(n, repr(x)) for n, x in i.callspec.params.items()} for i in grid if hasattr(i, "callspec")}
    values = Counter(name for name, _ in set().union(*cells.values()))
    for cell in cells.values():
        switches = sorted(x for x in cell if values[x[0]] == 2)
        if len(switches) > 1:
            cell ^= {*switches, *combinations(switches, 2)}  # the pairs in place of the values
    missing, had = set().union(*cells.values()), Counter()
    chosen = [item for item in grid if item not in cells]
    while missing:
        chosen.append(max(cells, key=lambda item: (len(cells[item] & missing), -sum(had[x] for x in cells[item]))))
        missing -= cells[chosen[-1]]
        had.update(cells[chosen[-1]])
    return chosen
