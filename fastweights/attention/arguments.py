"""The words that a layer's arguments take, and which of them go together.

A combination that cannot compute raises; one that computes, but is likely to blow up in training, warns.
"""

from fastweights import features
from fastweights.checks import check_whole, warn_once
from fastweights.core import RULES, FastWeightError

# The one vocabulary of `norm`: what is done to the features, and what the layer does beside it.
# name -> (norm of the features, whether outputs are divided by what the normaliser z answers)
NORMS = {name: (name, False) for name in features.NORMS} | {
    "attention": ("none", True),
    "sum+attention": ("sum", True),
    "nlms": ("none", False),
}
# Decays that are learned from the token: one per head, or one per key channel
LEARNED = ("learned", "channel", "gla", "rwkv-7")
CHANNELS = ("channel", "gla", "rwkv-7")
BETAS = (None, True, False, "value", "step")
GATES = (True, False, "sigmoid")
ERASES = (True, False, "removal", "feedback")


def check_arguments(config):
    """Raise FastWeightError unless the arguments of a layer, the fields of `config`, go together."""
    check_whole(dim=config.dim, heads=config.heads, key_dim=config.key_dim, value_dim=config.value_dim)
    check_whole(key_heads=config.key_heads, decay_rank=config.decay_rank, writes=config.writes)
    check_whole(0, conv=config.conv, seed=config.seed)
    if config.dim % config.heads and None in (config.key_dim, config.value_dim):
        raise FastWeightError(
            f"dim is {config.dim} with heads={config.heads}; expected a multiple of heads, or key_dim and value_dim "
            "given: a head is dim / heads wide"
        )
    if config.key_heads and config.heads % config.key_heads:
        raise FastWeightError(
            f"key_heads is {config.key_heads}; expected a divisor of heads={config.heads}: "
            "each key head serves as many memories as the others"
        )
    if config.rule not in RULES:
        raise FastWeightError(f"rule is {config.rule!r}; expected one of {', '.join(map(repr, RULES))}")
    if config.norm not in NORMS:
        raise FastWeightError(f"norm is {config.norm!r}; expected one of {', '.join(map(repr, NORMS))}")
    for name, allowed in (("beta", BETAS), ("gate", GATES), ("erase", ERASES)):
        if getattr(config, name) not in allowed:
            raise FastWeightError(f"{name} is {getattr(config, name)!r}; expected {', '.join(map(repr, allowed))}")
    _check_general(config)
    if not 0 < config.beta_max <= 2:
        raise FastWeightError(
            f"beta_max is {config.beta_max}; expected above 0 and at most 2: past it the delta rule's memory grows"
        )
    if config.conv == 1:
        raise FastWeightError(f"conv is {config.conv}; expected 0 for none, or a width of at least 2 tokens")


def _check_general(config):
    """Raise where several writes, an erase key or a decay per channel meet what they cannot."""
    if config.erase and not RULES[config.rule].erases:
        raise FastWeightError(
            f"erase is {config.erase!r} with rule={config.rule!r}; expected False: it corrects nothing"
        )
    if config.erase == "feedback" and (config.decay in CHANNELS or config.writes > 1):
        raise FastWeightError(
            f"erase is 'feedback' with decay={config.decay!r} and writes={config.writes}; expected one decay per head "
            "and writes=1: the feedback reads the memory before its token's decay"
        )
    if config.erase == "removal" and (config.decay != "rwkv-7" or config.writes > 1 or config.beta is not False):
        raise FastWeightError(
            f"erase is 'removal' with decay={config.decay!r}, writes={config.writes} and beta={config.beta}; expected "
            "decay='rwkv-7', writes=1 and beta=False: its two writes per token have rates of their own"
        )
    if config.beta == "step" and (config.decay != "learned" or config.writes > 1):
        raise FastWeightError(
            f"beta is 'step' with decay={config.decay!r} and writes={config.writes}; expected decay='learned' and "
            "writes=1: the step that decays is the one that writes"
        )
    general = config.writes > 1 or config.erase or (config.decay in CHANNELS and config.rule != "sum")
    if config.attention_norm and general:
        raise FastWeightError(
            f"norm is {config.norm!r} with writes={config.writes}, erase={config.erase} and decay={config.decay!r}; "
            "expected another norm: its normaliser z has one write per token and one decay per head"
        )


def warn_of_growth(config):
    """Warn of two combinations that compute, but whose memory or output is likely to blow up in training."""
    if config.rule == "delta" and config.norm == "none" and config.erase != "removal":
        warn_once(
            'rule="delta" with norm="none": a write multiplies the memory by I - beta k k^T, which grows it '
            'whenever beta |k|^2 > 2; expect the memory to diverge. norm="l2" or "sum" bounds it.'
        )
    if config.attention_norm and config.phi.kind in ("identity", "silu"):
        warn_once(
            f"norm={config.norm!r} with features={config.features!r}: features of both signs let the normaliser z . q "
            'pass through zero, where the output is unbounded; use "relu", "elu+1", "dpfp-NU" or "favor-M".'
        )
