"""Parameters of a layer as NumPy arrays by name, the same names and layout in every framework, and back.

The projections of a PyTorch layer are `nn.Linear` modules; elsewhere they are bare matrices.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fastweights.checks import check_parameters

PROJECTIONS = ("in_proj", "out_proj", "slow")  # nn.Linear, whose weight is (out, in); exported as (in, out)


def from_bare_parameters(module, state_dict, prefix, *args):
    """Turn a saved state_dict of the older form into today's, in place, before PyTorch loads it.

    Older checkpoints hold a projection as one parameter (in, out); today it is the weight (out, in) of a Linear.
    """
    for name in PROJECTIONS:
        if prefix + name in state_dict:
            state_dict[f"{prefix}{name}.weight"] = state_dict.pop(prefix + name).mT


def export_parameters(module: nn.Module) -> dict[str, np.ndarray]:
    """Parameters by the name that they have in every framework, as NumPy; bfloat16 as float32.

    A layer that was trained in PyTorch goes on in Flax or Keras this way: `import_parameters` there takes this dict.

        >>> import torch
        >>> from fastweights.torch import FastWeightAttention
        >>> {name: array.shape for name, array in export_parameters(FastWeightAttention(8, heads=2)).items()}
        {'out_norm': (4,), 'in_proj': (8, 26), 'out_proj': (8, 8)}

    They are the names of the state_dict, but for projections: "in_proj.weight" (out, in) is in_proj (in, out). FAVOR+
    adds "projection" and "draws".

    Args:
        module: a layer of this library, or a module that contains some.

    Returns:
        Name -> NumPy array, copies that share nothing with the module.
    """
    weights = _weights(module).items()
    return {name: np.array((x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)) for name, x in weights}


@torch.no_grad()
def import_parameters(module: nn.Module, arrays: Mapping[str, Any]) -> None:
    """Set the parameters to `arrays`, which `export_parameters` of any framework gave for the same layer.

    Args:
        module: the layer to fill, made with the same arguments as the one that was exported.
        arrays: name -> array. A missing, unknown or misshapen one raises FastWeightError, before anything is changed.

    Examples:
        >>> import torch
        >>> from fastweights.torch import FastWeightAttention
        >>> one, other = FastWeightAttention(8, heads=2), FastWeightAttention(8, heads=2)
        >>> import_parameters(other, export_parameters(one))
        >>> x = torch.randn(1, 5, 8)
        >>> torch.equal(one(x)[0], other(x)[0])
        True
    """
    weights = _weights(module)
    check_parameters(arrays, {name: x.shape for name, x in weights.items()})
    for name, x in weights.items():
        x.copy_(torch.from_numpy(np.array(arrays[name])))


def _weights(module):
    """The state_dict by the names of every framework, without the count of draws where nothing is drawn.

    Values are the module's own tensors (projections transposed as a view), so writing into them changes the module.
    """
    state = module.state_dict()
    found = {}
    for name, x in state.items():
        owner, _, last = name.rpartition(".")
        if last == "weight" and owner.rpartition(".")[2] in PROJECTIONS and x.dim() == 2:
            found[owner] = x.mT
        elif last != "draws" or name.removesuffix("draws") + "projection" in state:
            found[name] = x
    return found
