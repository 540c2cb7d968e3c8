"""Checks of the arguments of a Fast Weight Layer before it computes, the same in every framework.

Every function here raises FastWeightError or returns nothing. `FWLBlock` of each framework calls them with its own
arrays; all but `check_values` look at shapes and dtypes alone, so that they work on traced arrays too.
"""

from fastweights.checks import check_offsets, check_packing
from fastweights.core import FastWeightError, dtype_name


def check_shapes(config, x, labels, weights, inputs=None):
    """Raise unless x is (B, T, D), labels (B, T) or one-hot (B, T, V), and weights (B, T).

    inputs: D, the width that x must have; any width when None.
    """
    if len(x.shape) != 3 or (inputs is not None and x.shape[-1] != inputs):
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected (B, T, {inputs or 'D'}): the body's output")
    B, T = x.shape[:2]
    if B == 0:
        raise FastWeightError(f"x has shape {tuple(x.shape)}; expected at least one sequence")
    V = config.vocab_size
    if len(labels.shape) == 3 and labels.shape[-1] != V:
        raise FastWeightError(
            f"labels has shape {tuple(labels.shape)}; expected (B, T, {V}) for one-hot labels: vocab_size is {V}"
        )
    for name, array, axes in (("labels", labels, labels.shape[:2]), ("weights", weights, weights.shape)):
        # None is a size that Keras does not know yet
        if len(axes) != 2 or any(a != b and None not in (a, b) for a, b in zip(axes, (B, T), strict=True)):
            raise FastWeightError(f"{name} has shape {tuple(array.shape)}; expected ({B}, {T}): one per token of x")


def check_state(config, state, sequences, inputs):
    """Raise unless `state` is an FWLState of a block with these arguments.

    Args:
        config: an FWLConfig without `refresh`; refresh.check_state is the check of a block that has one.
        state: what the user passed.
        sequences: number of sequences that x holds.
        inputs: D, the width of x.
    """
    if hasattr(state, "shares"):
        raise FastWeightError(
            f"state is that of a stream with refresh={state.pending.shape[1]}; expected one of "
            "refresh=None: a stream goes on as it began"
        )
    check_shape_of_state(config, state, sequences, inputs)


def check_shape_of_state(config, state, sequences, inputs):
    """Raise unless state.dense1 has the shape of the first layer's weights, one set per sequence.

    The state may be an FWLState or a RefreshState; arguments are those of `check_state`.
    """
    got, expected = tuple(state[0].shape), (sequences, 1, inputs + 1, config.hidden_width)
    if got[1:] != expected[1:] or (got[0] != expected[0] and None not in (got[0], expected[0])):
        why = "the state of another block" if got[1:] != expected[1:] else f"x has {sequences} sequences"
        raise FastWeightError(f"state.dense1 has shape {got}; expected {expected}: {why}")


def check_previous(config, previous_label, state):
    """Raise unless the token that waits in the state can be learned now, as `previous_label` asks for.

    Args:
        config: an FWLConfig.
        previous_label: (B,), the label of the token that waits.
        state: of an earlier call; without one no token waits.
    """
    if state is None:
        raise FastWeightError(
            "previous_label is given without a state; expected both: it is the label of the token "
            "that waits in the state"
        )
    if isinstance(config.normalizer, str):
        raise FastWeightError(
            f"normalizer is {config.normalizer!r}; expected a number of tokens for previous_label: "
            "the waiting token belongs to another batch"
        )
    if tuple(previous_label.shape) != tuple(state.waiting.shape):
        raise FastWeightError(
            f"previous_label has shape {tuple(previous_label.shape)}; expected "
            f"{tuple(state.waiting.shape)}: one per sequence"
        )


def check_values(config, smallest, largest, bad_weight):
    """Raise unless labels lie in the vocabulary and weights are finite and not negative.

    Args:
        config: an FWLConfig.
        smallest, largest: the least and the greatest label.
        bad_weight: a weight that is negative or not finite if there is one, else 0.
    """
    if smallest < 0 or largest >= config.vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise FastWeightError(
            f"labels has {wrong}; expected 0 to {config.vocab_size - 1}: vocab_size is "
            f"{config.vocab_size} (give padding any label and weight 0)"
        )
    if not 0 <= bad_weight < float("inf"):
        raise FastWeightError(f"weights has {bad_weight}; expected finite numbers of at least 0: 0 leaves a token out")


def check_packed(x, cu_seqlens, offsets=None):
    """Raise unless cu_seqlens can cut the one row of x (1, T, D) into documents.

    offsets: the values of cu_seqlens as a list, which are checked too; None where they are not known yet.
    """
    check_packing(tuple(cu_seqlens.shape), dtype_name(cu_seqlens), x.shape[0], "x")
    if offsets is not None:
        check_offsets(offsets, x.shape[1])
