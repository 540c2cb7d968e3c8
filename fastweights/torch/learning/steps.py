"""The step sizes of a Fast Weight Layer as the hand-written forms use them."""

import torch
from torch import Tensor

from fastweights.fwl_config import FWLConfig


def used_steps(config: FWLConfig, steps: Tensor) -> Tensor:
    """The six step sizes (6,), in the order of `fwl_config.STEPS`, from the parameter `steps`.

    With `log_steps` the parameter holds their logarithms; without `fast_bias` the biases do not learn, and their steps
    are 0; with `shared_norm_step` the shift of the norm has the step of its scale. Made without values from the host,
    so that a CUDA graph can capture it, and differentiable.
    """
    steps = steps.exp() if config.log_steps else steps
    if not config.fast_bias:
        zero = torch.zeros_like(steps[:1])
        steps = torch.cat([steps[:1], zero, steps[2:3], zero, steps[4:]])
    if config.shared_norm_step:
        steps = torch.cat([steps[:5], steps[4:5]])
    return steps
