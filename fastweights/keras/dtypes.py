"""What a tensor of Keras is to a type checker, and the dtype that sums are kept in: float32 or wider."""

from typing import Any

from fastweights.core import dtype_name

Tensor = Any  # of the backend in use


def accumulation_dtype(like: Any) -> str:
    """float64 for float64, else float32; `like` is a tensor or the name of its dtype.

    Examples:
        >>> accumulation_dtype("bfloat16")
        'float32'
    """
    return "float64" if (like if isinstance(like, str) else dtype_name(like)) == "float64" else "float32"
