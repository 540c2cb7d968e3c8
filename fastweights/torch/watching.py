"""Who looks on while memories are written: empty lists, unless a probe is open."""

from collections.abc import Callable
from typing import Any

watchers: list[Callable[[Any, Any], None]] = []  # called as watch(inputs, spec) before a call of `fast_weight` runs
steps: list[list[Any]] = []  # where a held Fast Weight Layer notes the norm (N,) of each change of its weights
