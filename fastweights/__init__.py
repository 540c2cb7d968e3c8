"""Memories that a network writes while it reads.

Import the framework you use: `import fastweights.torch as fw`, `fastweights.jax`, `fastweights.keras`.
"""

from fastweights.core import FastWeightError as FastWeightError
from fastweights.core import FastWeightWarning as FastWeightWarning
from fastweights.debugging import debug as debug

__version__ = "0.1.0"
