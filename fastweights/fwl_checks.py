"""What a Fast Weight Layer checks before it computes, in every framework."""

from fastweights.checks import check_offsets, check_packing
from fastweights.core import FastWeightError, dtype_name


def check_shapes(config, x, labels, weights, inputs=None):
    """Raise unless x, labels and weights fit; shapes alone."""
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
    for name, y, axes in (("labels", labels, labels.shape[:2]), ("weights", weights, weights.shape)):
        if len(axes) != 2 or any(a != b and None not in (a, b) for a, b in zip(axes, (B, T), strict=True)):
            raise FastWeightError(f"{name} has shape {tuple(y.shape)}; expected ({B}, {T}): one per token of x")


def check_state(config, state, sequences, inputs):
    """Raise unless the state is one of this block's, of as many sequences; shapes alone."""
    if hasattr(state, "shares"):
        raise FastWeightError(
            f"state is that of a stream with refresh={state.pending.shape[1]}; expected one of "
            "refresh=None: a stream goes on as it began"
        )
    check_shape_of_state(config, state, sequences, inputs)


def check_shape_of_state(config, state, sequences, inputs):
    """Raise unless what a state has learned has the shape of this block's weights; refresh or not."""
    got, expected = tuple(state[0].shape), (sequences, 1, inputs + 1, config.hidden_width)
    if got[1:] != expected[1:] or (got[0] != expected[0] and None not in (got[0], expected[0])):
        why = "the state of another block" if got[1:] != expected[1:] else f"x has {sequences} sequences"
        raise FastWeightError(f"state.dense1 has shape {got}; expected {expected}: {why}")


def check_previous(config, previous_label, state):
    """Raise unless a waiting token can be learned: there is a state, and the size of its step is known."""
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


def check_values(config, smallest, largest, worst):
    """Raise unless labels lie in the vocabulary and weights are finite and not negative, given their extremes."""
    if smallest < 0 or largest >= config.vocab_size:
        got = smallest if smallest < 0 else largest
        raise FastWeightError(
            f"labels has {got}; expected 0 to {config.vocab_size - 1}: vocab_size is "
            f"{config.vocab_size} (give padding any label and weight 0)"
        )
    if not 0 <= worst < float("inf"):
        raise FastWeightError(f"weights has {worst}; expected finite numbers of at least 0: 0 leaves a token out")


def check_packed(x, cu_seqlens, offsets=None):
    """Raise unless cu_seqlens can cut the one row of x (1, T, D) into documents.

    offsets: its values as a list, where they are known and T is.
    """
    check_packing(tuple(cu_seqlens.shape), dtype_name(cu_seqlens), x.shape[0], "x")
    if offsets is not None:
        check_offsets(offsets, x.shape[1])
