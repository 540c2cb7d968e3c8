"""What `FastWeightAttention` checks of a call before it computes: its input, mask and carried state."""

from fastweights.checks import check_mask
from fastweights.core import FastWeightError


def check_input(config, x, state, mask, cu_seqlens=None):
    """Raise FastWeightError unless these are what a layer of this config takes: x (B, T, dim), a state of three, a
    bool mask.
    """
    if len(x.shape) != 3 or x.shape[-1] != config.dim:
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected (B, T, {config.dim}): dim is {config.dim}")
    if state is not None and len(state) != 3:
        raise FastWeightError(
            f"state is a {type(state).__name__} of {len(state)}; expected the AttentionState that "
            "an earlier call returned"
        )
    if state is not None and (config.conv or config.attention_norm):
        check_carried(config, x, state, cu_seqlens)
    if mask is not None:
        check_mask(x, mask)


def check_carried(config, x, state, cu_seqlens):
    """Raise FastWeightError unless z and the convolution's last inputs in an AttentionState are those of as many texts.

    `fast_weight` checks the memory.
    """
    texts = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] and cu_seqlens.shape[0] - 1
    expected = {}
    if config.attention_norm and state[0] is not None:
        expected["z"] = state[1], (texts, config.heads, config.feature_width)
    if config.conv and state[2] is not None:
        expected["conv"] = state[2], (texts, config.conv - 1, config.channels)
    for name, (part, wanted) in expected.items():
        got = None if part is None else tuple(part.shape)
        if got is None or len(got) != 3 or any(n != m and None not in (n, m) for n, m in zip(got, wanted, strict=True)):
            raise FastWeightError(
                f"state.{name} has shape {got}; expected {wanted}: that of {texts} texts, as an earlier call of this "
                "layer returned it"
            )
