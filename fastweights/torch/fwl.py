"""Fast Weight Layers for PyTorch: parameters and checks. The mathematics is in fastweights/fwl.py (the published layer)
and fastweights/refresh.py (the refreshed one), faster ways to compute it in torch/learning/.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from fastweights import fwl, fwl_checks, fwl_config
from fastweights.checks import check_whole
from fastweights.core import FastWeightError
from fastweights.debugging import debugging
from fastweights.fwl_config import FWLOutput, FWLState
from fastweights.literals import Normalizer, Rule, Within
from fastweights.refresh import RefreshState, check_state, labelled
from fastweights.torch.dtypes import accumulation_dtype
from fastweights.torch.framework import OPS
from fastweights.torch.learning import published_loss, refresh, training_loss
from fastweights.torch.private import is_transformed, is_watched


class FWLBlock(LazyModuleMixin, nn.Module):
    """A Fast Weight Layer (Clark et al. 2022): an output block that learns from the document it reads.

        >>> from fastweights.torch import make_labels
        >>> block = FWLBlock(16, vocab_size=50)
        >>> tokens = torch.randint(50, (2, 12))
        >>> labels, weights = make_labels(tokens)
        >>> logits = block(torch.randn(2, 12, 8), labels, weights)      # x (B, T, D) from any causal body

    The logits at token t come from the block's parameters minus step sizes times the gradients of the losses of the
    tokens before t. Training through them teaches parameters that learn well from a document.

    Args:
        size: width of the block's output; its hidden layer is `hidden`, 4 * size when absent.
        vocab_size: number of labels.
        attn_chunks: pieces the sequence is cut into for speed (any length); chosen when absent. Changes no result.
        inputs: width of x; taken from the first call when absent.
        normalizer: what the summed losses are divided by before their gradient is taken: "batch" (published: all
            weights of the batch), "sequence" (those of a token's own sequence), or a number of tokens, with which
            updates depend on nothing but the past: batches, padding and streaming change nothing.
        step_size: initial value of the six learned step sizes, one per parameter tensor.
        fast_bias, shared_norm_step: False and True give the published JAX form, the defaults its TensorFlow form.
        rule: "sum" adds up the gradients; "delta" lets a write replace what its input retrieves.
        decay: share of the fast weights kept per token; all when absent.
        clip: largest length of a token's gradient at each layer.
        first_order: cut the second-order part of the training gradient (the steps still learn).
        eps: of the layer norm.
        refresh: tokens after which gradients are taken at the weights as they have become: they then correct what was
            learned, so that nothing need decay. None for the published layer, whose gradients are those of the
            trained weights and add up.
        within: how the tokens between two refreshes are answered: "held", with the weights as they were at the first
            of them (dynamic evaluation of this block), or "cumulative", as the published layer does.
        log_steps: the parameter `steps` holds the logarithms of the steps, which then stay positive, and the rate of
            an optimiser is a share of them.
        unembed: (vocab_size, size) weight to share, such as `embedding.weight`; its own when absent.
        bias: whether the output embedding has a bias; when absent, only if it is the block's own.
    """

    cls_to_become = None  # stays what it is once the input width is known
    dense1: nn.Parameter | UninitializedParameter
    unembed: nn.Parameter
    unembed_bias: nn.Parameter | None
    scale: nn.Parameter
    steps: nn.Parameter

    def __init__(
        self,
        size: int,
        vocab_size: int,
        attn_chunks: int | None = None,
        *,
        inputs: int | None = None,
        hidden: int | None = None,
        normalizer: Normalizer | float = "batch",
        step_size: float = 0.01,
        fast_bias: bool = True,
        shared_norm_step: bool = False,
        rule: Rule = "sum",
        decay: float | None = None,
        clip: float | None = None,
        first_order: bool = False,
        eps: float = 1e-6,
        refresh: int | None = None,
        within: Within = "held",
        log_steps: bool = False,
        unembed: nn.Parameter | None = None,
        bias: bool | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.config = fwl_config.FWLConfig(
            size,
            vocab_size,
            attn_chunks,
            hidden=hidden,
            normalizer=normalizer,
            step_size=step_size,
            fast_bias=fast_bias,
            shared_norm_step=shared_norm_step,
            rule=rule,
            decay=decay,
            clip=clip,
            first_order=first_order,
            eps=eps,
            refresh=refresh,
            within=within,
            log_steps=log_steps,
        )
        if unembed is not None and tuple(unembed.shape) != (vocab_size, size):
            raise FastWeightError(
                f"unembed has shape {tuple(unembed.shape)}; expected ({vocab_size}, {size}): "
                "(vocab_size, size), as an nn.Embedding's weight"
            )
        check_whole(inputs=inputs)
        factory = dict(device=device, dtype=dtype or torch.get_default_dtype())
        for name, shape in self.config.shapes(inputs or 1).items():
            if name == "unembed" and unembed is not None:
                self.unembed = unembed
            elif name == "dense1" and inputs is None:
                self.dense1 = UninitializedParameter(**factory)
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
        self.tied = unembed is not None
        if not (unembed is None if bias is None else bias):
            self.unembed_bias = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights anew, but an output embedding that belongs to another module."""
        constants = dict(scale=1.0, steps=self.config.initial_step)
        for name, p in self.named_parameters(recurse=False):
            if isinstance(p, UninitializedParameter) or (name == "unembed" and self.tied):
                continue
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[0] ** -0.5)
            else:
                nn.init.constant_(p, constants.get(name, 0.0))

    def initialize_parameters(self, x: Tensor, *args: Any, **kwargs: Any) -> None:
        """Make the first layer's weight as wide as x: a hook that PyTorch's lazy modules call at the first call."""
        if self.has_uninitialized_params():
            if is_transformed():
                raise FastWeightError(
                    "inputs is not known yet; expected FWLBlock(..., inputs=D) or a call before this one: under a "
                    "transform of torch.func no parameters can be made"
                )
            with torch.no_grad():
                assert isinstance(self.dense1, nn.UninitializedParameter)
                self.dense1.materialize((x.shape[-1], self.config.hidden_width))
                nn.init.normal_(self.dense1, std=x.shape[-1] ** -0.5)

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Fast logits (B, T, V), in parallel over tokens: what training and scoring a whole text need.

        Args:
            x: (B, T, D), output of a causal body.
            labels: (B, T) next tokens, or one-hot (B, T, V). A token's logits do not depend on its own label, only on
                those of earlier tokens.
            weights: (B, T), 0 where a token has no label; `make_labels` makes both.
        """
        return self.run(x, labels, weights).logits

    def run(
        self,
        x: Tensor,
        labels: Tensor,
        weights: Tensor,
        state: Any = None,
        *,
        previous_label: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        logits: bool = True,
        slow: bool = True,
    ) -> FWLOutput:
        """Logits, per-token loss of both passes and the state after x.

        Args:
            x, labels, weights: as for `forward`.
            state: from an earlier call, to go on with the same document: an FWLState, or a RefreshState with `refresh`.
            previous_label: (B,), the first token of this part of the document: the label of the last token of the part
                before, which waits in the state until its label is known. It is learned first, with weight 1. When
                absent, that token is never learned, unless its label was passed, with a weight, in the part before.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row.
            logits: False leaves the logits None and computes them in blocks, for the loss alone.
            slow: False leaves slow_loss None for a block with `refresh`, which need not compute it then.

        Returns:
            An `FWLOutput`. Where loss is below slow_loss, learning from the document has helped.

        Examples:
            >>> from fastweights.torch import make_labels
            >>> block = FWLBlock(8, vocab_size=20, inputs=8, normalizer=16.0)
            >>> tokens, x = torch.randint(20, (1, 6)), torch.randn(1, 6, 8)
            >>> out = block.run(x, *make_labels(tokens))
            >>> out.logits.shape, out.loss.shape, out.state.dense1.shape
            (torch.Size([1, 6, 20]), torch.Size([1, 6]), torch.Size([1, 1, 9, 32]))
            >>> more = block.run(x, *make_labels(tokens), out.state, previous_label=tokens[:, 0])  # it goes on
        """
        labels, weights = self._checked(x, labels, weights, cu_seqlens)
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state is not None:
            self._check_state(state, sequences)
        if previous_label is not None:
            fwl_checks.check_previous(self.config, previous_label, state)
            previous_label = self._in_vocabulary(previous_label, previous_label.new_ones(()))
        arguments = self.config, OPS, self._weights(), x, labels, weights
        if self.config.refresh is None:
            return fwl.forward(*arguments, state, previous_label=previous_label, cu_seqlens=cu_seqlens, logits=logits)
        fresh = state is None
        state = self.init_state(sequences) if state is None else state
        if previous_label is not None:
            state = self.label_waiting(previous_label, state)
        return refresh.run(*arguments, state, fresh=fresh, cu_seqlens=cu_seqlens, logits=logits, slow=slow)

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """The training loss, the mean over tokens weighted with `weights`, without ever holding the logits.

        For the published layer with the sum rule (learning/published_loss.py) and the refreshed one with within="held"
        (learning/training_loss.py), forward and backward pass are written by hand. That takes half the time and half
        the memory of `run` for the published layer. Everything else goes through `run`.

        Args:
            x: (B, T, D).
            labels, weights: (B, T); `make_labels` makes both.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row.

        Examples:
            >>> from fastweights.torch import make_labels
            >>> block = FWLBlock(8, vocab_size=20, inputs=8)
            >>> labels, weights = make_labels(torch.randint(20, (2, 6)))
            >>> block.loss(torch.randn(2, 6, 8), labels, weights).backward()
            >>> block.steps.grad.shape  # the sizes of the steps learn too
            torch.Size([6])
        """
        if self._published_by_hand(weights):
            labels, weights = self._checked(x, labels, weights, cu_seqlens)
            share = weights / fwl.normalization(self.config, OPS, weights, cu_seqlens)
            return published_loss.loss(self.config, self._weights(), x, labels, weights, share, cu_seqlens)
        total = weights.sum().clamp(min=1e-8)
        if cu_seqlens is None and x.shape[1] and not training_loss.refuses(self.config, x, weights, None, packed=False):
            labels, weights = self._checked(x, labels, weights)
            return training_loss.objective(self.config, self._weights(), x, labels, weights).value / total
        out = self.run(x, labels, weights, cu_seqlens=cu_seqlens, logits=False, slow=False)
        return (out.loss * weights).sum() / total

    def _published_by_hand(self, weights):
        """Whether published_loss.py covers this layer, and gradients of weights and transforms are not asked for."""
        covered = (self.config.rule, self.config.clip, self.config.refresh) == ("sum", None, None)
        return covered and not weights.requires_grad and not is_watched()

    def slow_logits(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) of the parameters as they are, which learned nothing from the document, for x (B, T, D)."""
        self.initialize_parameters(x)
        params = self._weights()
        return fwl.slow_pass(self.config, OPS, params, x).n @ params["unembed"] + params["unembed_bias"]

    def slow_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss (B, T) of each label by the parameters as they are, without holding the logits."""
        self.initialize_parameters(x)
        params = self._weights()
        return OPS.loss(fwl.slow_pass(self.config, OPS, params, x).n, params["unembed"], params["unembed_bias"], labels)

    def init_state(self, batch: int) -> Any:
        """The state before the first token of `batch` sequences, for `step`: nothing learned, nothing waiting."""
        if self.has_uninitialized_params():
            raise FastWeightError("inputs is not known yet; expected FWLBlock(..., inputs=D) or a call before this")
        config, inputs = self.config, self.dense1.shape[0]
        if config.refresh is not None:
            return refresh.init_state(config, inputs, batch, self.scale)
        F, size, wide = config.hidden_width, config.size, accumulation_dtype(self.scale)
        shapes = (1, inputs + 1, F), (1, F + 1, size), (1, 1, 2 * size)
        dense1, dense2, norm = (self.scale.new_zeros(batch, *shape, dtype=wide) for shape in shapes)
        pending, waiting = self.scale.new_zeros(batch, inputs), self.scale.new_zeros(batch, dtype=wide)
        return FWLState(dense1, dense2, norm, pending, waiting)

    def step(
        self, x: Tensor, previous_label: Tensor | None, state: Any, weight: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Logits (B, V) and the state for the next token x (B, D): a stream, token by token.

        A stream does not know how many tokens it will have, so `normalizer` must be a number.

        Args:
            x: (B, D), input of the token.
            previous_label: (B,) label of the token before x, which can be learned now; None at the first token.
            state: what the last call returned, or `init_state(B)`.
            weight: (B,) of previous_label; 1 when absent, 0 leaves it unlearned.

        Examples:
            >>> block = FWLBlock(8, vocab_size=20, inputs=8, normalizer=16.0)
            >>> state, label = block.init_state(1), None
            >>> for _ in range(3):
            ...     logits, state = block.step(torch.randn(1, 8), label, state)
            ...     label = logits.argmax(-1)  # the next token is known now, and will be learned with the next call
        """
        self._normalizer_as_number("step: a stream does not know how many tokens will follow")
        self._check_state(state, x.shape[0])
        if self.config.refresh is not None:
            return self._refreshed_step(x, previous_label, state, weight)
        if previous_label is None:
            previous_label = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
            weight = torch.zeros_like(state.waiting)
        weight = torch.ones_like(state.waiting) if weight is None else weight
        return fwl.step(self.config, OPS, self._weights(), x, previous_label, weight, state)

    def label_waiting(self, label: Tensor, state: RefreshState) -> RefreshState:
        """The state of a refreshed block with the label (B,) of its newest token; a label that is there already stays.

        A stream that was cut after a token learns from it only once it has the label: by this, or by `previous_label`.
        """
        return labelled(self.config, OPS, state, label, torch.ones_like(label))

    @torch.no_grad()
    def start_steps(self, x: Tensor, factor: float = 1.0) -> None:
        """Set each step to factor / mean |key|^2: with 1, a token's step moves each layer's output by its gradient.

        A key is what a layer's gradient is multiplied with: its input and the 1 of its bias; for the layer norm the
        standardised vector and 1.

        Args:
            x: (B, T, D), inputs of the kind that the block will see.
            factor: one for all steps.
        """
        normalizer = self._normalizer_as_number("start_steps: a step is a token's")
        self.initialize_parameters(x)
        slow = fwl.slow_pass(self.config, OPS, self._weights(), x)
        sizes = [key.double().square().sum(-1).mean() + 1 for key in (x, slow.a, slow.xhat)]
        steps = factor * normalizer / torch.stack(sizes).repeat_interleave(2)
        self.steps.copy_(steps.log() if self.config.log_steps else steps)

    def step_sizes(self) -> dict[str, float]:
        """The step sizes as they are now, by the name of the tensor that each of them belongs to.

        Examples:
            >>> FWLBlock(8, vocab_size=20, step_size=0.5).step_sizes()["dense1"]
            0.5
        """
        steps = self.steps.detach().exp() if self.config.log_steps else self.steps.detach()
        return dict(zip(fwl_config.STEPS, steps.tolist(), strict=True))

    def _refreshed_step(self, x, previous_label, state, weight=None, full=None):
        """`step` of a refreshed block.  full: whether a full chunk waits in every row, where the caller knows it."""
        return refresh.step(self.config, OPS, self._weights(), x, previous_label, state, weight, full)

    def _normalizer_as_number(self, use: str) -> float:
        """The normalizer; raises FastWeightError unless it is a number.  use: which method needs that, and why."""
        normalizer = self.config.normalizer
        if isinstance(normalizer, str):
            raise FastWeightError(f"normalizer is {normalizer!r}; expected a number of tokens for {use}")
        return normalizer

    def _check_state(self, state, sequences):
        """Raise FastWeightError unless `state` is a state of this block for as many sequences."""
        check = fwl_checks.check_state if self.config.refresh is None else check_state
        check(self.config, state, sequences, self.dense1.shape[0])

    def _weights(self):
        """Parameters by the names of fwl.py: the output embedding as (size, V), zeros for a bias that is absent."""
        params: dict[str, Tensor] = dict(self.named_parameters(recurse=False))
        params["unembed"] = self.unembed.mT if self.tied else self.unembed
        if self.unembed_bias is None:
            params["unembed_bias"] = self.scale.new_zeros(self.config.vocab_size)
        return params

    def has_uninitialized_params(self) -> bool:
        """Whether the width of x is not known yet; a form of the question that torch.compile can trace."""
        return isinstance(self.dense1, UninitializedParameter)

    def _checked(self, x, labels, weights, cu_seqlens=None):
        """Labels (B, T) as int64 and weights as floats, checked; makes the parameters if this is the first call."""
        self.initialize_parameters(x)
        fwl_checks.check_shapes(self.config, x, labels, weights, self.dense1.shape[0])
        if cu_seqlens is not None:
            fwl_checks.check_packed(x, cu_seqlens)
        weights = weights if weights.is_floating_point() else weights.to(x.dtype)
        return self._in_vocabulary(labels.argmax(-1) if labels.dim() == 3 else labels, weights), weights

    def _in_vocabulary(self, labels, weights):
        """labels as int64. Values of labels and weights are checked where that does not have to wait for a GPU."""
        if not is_watched() and labels.numel() and (not labels.is_cuda or debugging()):
            low, high = torch.aminmax(labels)
            bad = weights[~((weights >= 0) & weights.isfinite())]
            fwl_checks.check_values(self.config, int(low), int(high), float(bad[0]) if len(bad) else 0.0)
        return labels.long()

    def extra_repr(self) -> str:
        return self.config.summary
