"""The words that arguments take, as types that every framework's signatures share.

A type checker then knows that rule="detla" is wrong. docs/glossary.md and `fast_weight` say what each word means.
"""

from typing import Literal

Rule = Literal["delta", "sum"]
Read = Literal["after", "before"]
Norm = Literal["none", "sum", "l2", "max", "hellinger"]  # of features
LayerNorm = Literal["none", "sum", "l2", "max", "hellinger", "attention", "sum+attention", "nlms"]  # of a layer
Method = Literal["auto", "recurrent", "chunked", "kernel"]
Normalizer = Literal["batch", "sequence"]
Within = Literal["held", "cumulative"]
