"""Feature maps for keys and queries, and what normalises them, for every framework.

    name         phi(x), x of width d                                                      width of phi(x)
    identity     x                                                                         d
    relu         max(x, 0)                                                                 d
    silu         x sigmoid(x)                                                              d
    elu+1        x + 1 above 0, exp(x) below (Katharopoulos 2020)                          d
    dpfp-NU      products of [relu(x), relu(-x)] with itself rolled by 1..NU (Schlag 2021) 2 d NU
    favor-M      positive random features of the softmax kernel, M directions
                 (FAVOR+, Choromanski 2021)                                                2 M
    a function   of arrays of the framework, (..., d) -> (..., width)        its `width`, or d

A user's function keeps the width d unless it has an attribute `width`, a number or a function of d.

`xp` is the array namespace (numpy's spelling), `nn` where `silu` lives: (torch, fastweights.torch.hand_gradients),
(jax.numpy, jax.nn), (keras.ops, keras.ops). Inputs are float32 or wider: the frameworks cast around the call, so
that bfloat16 loses nothing but the rounding of its input and output.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fastweights.core import FastWeightError

if TYPE_CHECKING:
    import numpy as np

EPS = 1e-12  # added to the sum of features (sum norm) and to the sum of squares (L2 norm)

PLAIN = ("identity", "relu", "silu", "elu+1")
SIZED = ("dpfp", "favor")
NORMS = ("none", "sum", "l2", "max", "hellinger")


class FeatureMap(NamedTuple):
    """A feature map by name. A tuple, which every torch.compile can trace.

        >>> parse("dpfp-3").width(16)
        96
        >>> parse("dpfp-3").name
        'dpfp-3'

    Attributes:
        kind: "identity", "relu", "silu", "elu+1", "dpfp", "favor" or "function".
        size: NU of DPFP or M of FAVOR+; 0 for the others.
        function: a user's own map, for kind "function".
    """

    kind: str
    size: int = 0
    function: Callable[[Any], Any] | None = None  # a user's own

    @property
    def name(self):
        """The name as a user writes it, "dpfp-3"; of a function, its own."""
        if self.function is not None:
            return getattr(self.function, "__name__", type(self.function).__name__)
        return f"{self.kind}-{self.size}" if self.size else self.kind

    @property
    def random(self):
        """Whether the map needs a projection (see `favor_projection`)."""
        return self.kind == "favor"

    def width(self, d):
        """Width of phi(x) for x of width d: the number of rows that the memory will have."""
        if self.kind == "dpfp" and self.size > 2 * d - 1:
            raise FastWeightError(
                f"features is {self.name!r} for width {d}; expected NU of at most 2 * {d} - 1: "
                "rolling further repeats a product"
            )
        if self.function is not None:
            said = getattr(self.function, "width", d)
            return int(said(d) if callable(said) else said)
        return {"dpfp": 2 * d * self.size, "favor": 2 * self.size}.get(self.kind, d)

    def apply(self, x, xp, nn, *, norm="none", projection=None):
        """phi(x), normalised: x (..., d) -> (..., width(d)).

        Args:
            x: float32 or wider.
            xp, nn: the framework's array namespace and where its `relu` and `silu` live.
            norm: how phi(x) is scaled, see `normalise`.
            projection: (M, d) directions, for FAVOR+ alone.
        """
        if norm not in NORMS:
            raise FastWeightError(
                f"norm is {norm!r}; expected one of {', '.join(map(repr, NORMS))}: a norm of "
                "features ('attention' and 'nlms' are norms of the layer)"
            )
        if (projection is not None) != self.random:
            raise FastWeightError(
                f"projection is {'missing' if self.random else 'given'} for features {self.name!r}; "
                "expected a (M, d) projection for favor-M and none otherwise"
            )
        if self.function is not None:
            return normalise(self._own(x), norm, xp, nn)
        if self.kind == "favor":
            return normalise(_favor(x, projection, xp, rescale=norm != "none"), norm, xp, nn, positive=True)
        phi = {"identity": _identity, "relu": _relu, "silu": _silu, "elu+1": _elu_plus_one, "dpfp": _dpfp}[self.kind]
        return normalise(phi(x, xp, nn, self.size), norm, xp, nn, positive=self.kind not in ("identity", "silu"))

    def _own(self, x):
        """The user's function of x, whose width is what it says."""
        assert self.function is not None
        phi, width = self.function(x), self.width(x.shape[-1])
        if len(phi.shape) != len(x.shape) or phi.shape[-1] != width:
            raise FastWeightError(
                f"features {self.name!r} made {tuple(phi.shape)} of {tuple(x.shape)}; expected a "
                f"last axis of {width}: give the function an attribute `width`, a number or a "
                "function of the width it is given"
            )
        return phi


def parse(name):
    """The FeatureMap that `name` stands for; a FeatureMap is returned as it is, a function becomes one.

    Examples:
        >>> parse("elu+1").kind
        'elu+1'
        >>> parse("dpfp")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
          ...
        fastweights.core.FastWeightError: features is 'dpfp'; expected 'identity', ..., 'dpfp-NU' ...
    """
    if isinstance(name, FeatureMap):
        return name
    if callable(name):
        return FeatureMap("function", 0, name)
    kind, _, size = str(name).rpartition("-")
    if name in PLAIN:
        return FeatureMap(name)
    if kind in SIZED and size.isdigit() and int(size) > 0:
        return FeatureMap(kind, int(size))
    raise FastWeightError(
        f"features is {name!r}; expected {', '.join(map(repr, PLAIN))}, 'dpfp-NU' (such as 'dpfp-3') "
        "'favor-M' (such as 'favor-64') or a function"
    )


def parse_fixed(name):
    """`parse`, for a map that `fast_weight` applies by itself: one without directions of its own."""
    phi = parse(name)
    if phi.random:
        raise FastWeightError(
            f"features is {phi.name!r}; expected a map without random directions: give fast_weight what "
            "feature_map(x, ..., projection=...) returns"
        )
    return phi


def _identity(x, xp, nn, size):
    """phi(x) = x."""
    return x


def _relu(x, xp, nn, size):
    """phi(x) = max(x, 0)."""
    return nn.relu(x)


def _silu(x, xp, nn, size):
    """phi(x) = x sigmoid(x)."""
    return nn.silu(x)


def _elu_plus_one(x, xp, nn, size):
    """x + 1 above 0 and exp(x) below: positive everywhere, and smooth."""
    below = xp.where(x > 0, 0.0, x)  # exp never sees a large x: its infinity would poison the gradient
    return xp.where(x > 0, x + 1, xp.exp(below))


def _dpfp(x, xp, nn, size):
    """Products of u = [relu(x), relu(-x)] with itself rolled by 1, ..., NU, side by side.

    Few of the products are not 0, and different x have different ones: keys that were close become nearly orthogonal.
    """
    u = xp.concatenate([_relu(x, xp, nn, 0), _relu(-x, xp, nn, 0)], -1)
    return xp.concatenate([u * xp.roll(u, j, -1) for j in range(1, size + 1)], -1)


def _favor(x, projection, xp, *, rescale):
    """exp(+-w.x - |x|^2 / 2) / sqrt(2M) of x d^(-1/4), from its logarithm; divided by its maximum when rescaled.

    Under any norm a common factor of the features cancels, so it is taken out before exp can over- or underflow.
    """
    M, d = projection.shape
    x = x * d**-0.25
    u = x @ xp.swapaxes(projection, -1, -2)
    u = xp.concatenate([u, -u], -1)
    if rescale:
        return xp.exp(u - xp.amax(u, -1)[..., None])
    return xp.exp(u - 0.5 * xp.sum(x * x, -1)[..., None] - 0.5 * math.log(2 * M))


def unit(x, eps, xp, nn):
    """x / sqrt(sum x^2 + eps) over the last axis; a framework may bring its own."""
    own = getattr(nn, "unit", None)
    return x * (1.0 / xp.sqrt(xp.sum(x * x, -1) + eps))[..., None] if own is None else own(x, eps)


def normalise(x, norm, xp, nn, *, positive=False):
    """x / sum |x_j| (sum), x / |x| (l2), x / max |x_j| (max), sign(x) sqrt(|x| / sum |x_j|) (hellinger), or x (none).

    Over the last axis; zero stays zero.

    Args:
        x: (..., K) features.
        norm: "sum", "l2", "max", "hellinger" or "none".
        xp, nn: the framework's arrays and functions.
        positive: no feature is negative, so |x_j| is x_j.
    """
    size = (lambda y: y) if positive else xp.abs
    if norm == "sum":
        return x * (1.0 / (xp.sum(size(x), -1) + EPS))[..., None]
    if norm == "l2":
        return unit(x, EPS, xp, nn)
    if norm == "hellinger":
        share = x * (1.0 / (xp.sum(size(x), -1) + EPS))[..., None]
        return share / xp.sqrt(size(share) + EPS)  # a slope of 1 / sqrt(EPS) at 0 instead of an infinite one
    if norm == "max":
        return x * (1.0 / (xp.amax(size(x), -1) + EPS))[..., None]
    return x


def favor_projection(M: int, d: int, seed: int | Sequence[int]) -> "np.ndarray":
    """Random directions of FAVOR+, for `feature_map(x, "favor-M", projection=...)`.

    FAVOR+ estimates the kernel of softmax attention, exp(q . k / sqrt(d)), by the product of features of q and of k
    along random directions w. Orthogonal directions make the estimate less noisy than independent ones: rows are
    orthogonal within blocks of d, and each is as long as a Gaussian vector of width d.

        >>> favor_projection(8, 4, seed=0).shape
        (8, 4)

    Args:
        M: number of directions; features have width 2 M.
        d: width of queries and keys.
        seed: of NumPy's generator. The same seed gives the same directions in every framework.

    Returns:
        (M, d) NumPy float64.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    blocks = [np.linalg.qr(rng.standard_normal((d, d)))[0].T for _ in range(-(-M // d))]
    lengths = np.linalg.norm(rng.standard_normal((M, d)), axis=1)
    return np.ascontiguousarray(np.concatenate(blocks)[:M] * lengths[:, None])
