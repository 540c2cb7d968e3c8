"""Averages of result rows, such as over seeds: the mean of a number, with the lowest and the highest."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from fastweights.lab.engine.results import Row

T = TypeVar("T")


class Average(NamedTuple):
    """The mean of one number over several rows, and the lowest and highest of them."""

    mean: float
    lowest: float
    highest: float

    def text(self, form: str = ".3g") -> str:
        """The mean with the range in brackets, or the mean alone where lowest and highest are written alike.

        Args:
            form: how a number is written, as for `format`.

        Examples:
            >>> Average(22.93, 5.49, 40.4).text(), Average(0.5, 0.5, 0.5).text()
            ('22.9 (5.49 to 40.4)', '0.5')
        """
        mean, lowest, highest = (format(x, form) for x in self)
        return mean if lowest == highest else f"{mean} ({lowest} to {highest})"


def averages(rows: Iterable[Row], fields: tuple[str, ...], value: str) -> dict[tuple, Average]:
    """The average of one field over the rows that agree in some other fields.

    Args:
        rows: result rows; those in which `value` is absent or None are left out.
        fields: names of the fields that the rows of a group share. A row without a field counts as None there.
        value: name of the field that is averaged.

    Returns:
        {values of `fields`: average}, in the order in which the groups first appear.

    Examples:
        >>> averages([dict(R=20, seed=0, error=1.0), dict(R=20, seed=1, error=3.0)], ("R",), "error")
        {(20,): Average(mean=2.0, lowest=1.0, highest=3.0)}
    """
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault(tuple(row.get(name) for name in fields), []).append(float(row[value]))
    return {group: Average(sum(x) / len(x), min(x), max(x)) for group, x in groups.items()}


def select(groups: Mapping[tuple, T], *values: Any) -> dict[Any, T]:
    """The groups whose first fields have these values, by their last field.

    Args:
        groups: of `averages` or `means`.
        values: of all fields but the last.

    Examples:
        >>> select({("sum", 20): 0.1, ("delta", 20): 0.0, ("delta", 40): 0.2}, "delta")
        {20: 0.0, 40: 0.2}
    """
    return {key[-1]: group for key, group in groups.items() if key[:-1] == values}


def means(rows: Iterable[Row], fields: tuple[str, ...], value: str) -> dict[tuple, float]:
    """The means alone of what `averages` gives.

    Examples:
        >>> means([dict(R=20, seed=0, error=1.0), dict(R=20, seed=1, error=3.0)], ("R",), "error")
        {(20,): 2.0}
    """
    return {group: average.mean for group, average in averages(rows, fields, value).items()}
