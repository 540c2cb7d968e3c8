"""Fast Weight Layers of Flax and Keras are those of PyTorch: same weights, same logits, losses, states and gradients.

Keras takes one backend per process, so `test_keras_backend` runs this file once for each. One of them, here and now:
`KERAS_BACKEND=jax pytest --frameworks keras tests/test_fwl_frameworks.py`.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from oracle import assert_close

from fastweights import FastWeightError, fwl
from fastweights.fwl import STEPS, FWLState

if os.environ.get("KERAS_BACKEND") == "tensorflow":
    import torch._dynamo  # noqa: F401 - loads Triton, whose library aborts when it comes after TensorFlow's

ROOT = Path(__file__).parent.parent
B, T, D, SIZE, V = 2, 9, 3, 4, 5
NAMES = ["logits", "loss", "slow_loss", *FWLState._fields]


def flat(out):
    """An FWLOutput as a list."""
    return [*out[:3], *out[3]]


class Torch:
    """Makes the problem: a block, its weights, and what it gives."""

    def __init__(self, dtype="float64", **arguments):
        import torch

        import fastweights.torch as fw

        torch.manual_seed(0)
        self.torch, self.make_labels = torch, fw.make_labels
        arguments = dict(attn_chunks=2, step_size=0.5) | arguments
        self.block = fw.FWLBlock(SIZE, V, **arguments, inputs=D, dtype=getattr(torch, dtype))
        with torch.no_grad():  # every step its own
            self.block.steps.mul_(torch.linspace(0.6, 1.4, len(STEPS)))
            for name in ("bias1", "bias2", "shift"):
                getattr(self.block, name).normal_()
        self.weights = {name: p.detach().numpy() for name, p in self.block.named_parameters()}

    def run(self, x, labels, weights, state=None, cotangents=None, cu_seqlens=None):
        """Outputs and, of their sum times the cotangents, the gradients of x, the state and all parameters."""
        tensor = self.torch.tensor
        inputs = [tensor(a).requires_grad_() for a in (x, *(state or ()))]
        given = FWLState(*inputs[1:]) if state else None
        cu_seqlens = None if cu_seqlens is None else tensor(cu_seqlens)
        outputs = flat(self.block.run(inputs[0], tensor(labels), tensor(weights), given, cu_seqlens=cu_seqlens))
        found = [a.detach().numpy() for a in outputs]
        if cotangents is None:
            return found
        total = sum((a * tensor(c)).sum() for a, c in zip(outputs, cotangents, strict=True))
        of = [*inputs, *self.block.parameters()]
        gradients = self.torch.autograd.grad(total, of, allow_unused=True)
        return found, [np.zeros(a.shape) if g is None else g.numpy() for a, g in zip(of, gradients, strict=True)]


def problem(rng, B=B, T=T, dtype="float64"):
    labels, weights = rng.integers(V, size=(B, T)), np.ones((B, T), dtype)
    weights[:, -1], weights[0, 1] = 0, 0.5  # weights need not be 0 or 1
    return rng.standard_normal((B, T, D)).astype(dtype), labels, weights


class Flax:
    def __init__(self):
        import jax

        import fastweights.jax as fw
        from fastweights.jax import head
        from fastweights.jax.fwl import OPS

        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time here
        self.jax, self.fw, self.head, self.ops, self.array, self.numpy = (
            jax,
            fw,
            head,
            OPS,
            jax.numpy.asarray,
            np.asarray,
        )

    def cut(self, monkeypatch, words, tokens):
        """Blocks of so many words for so many tokens."""
        monkeypatch.setattr(self.head, "BLOCK", words * tokens)

    def make(self, weights, dtype="float64", **arguments):
        """The methods of a block with these weights; `with_weights` are the same with weights as first argument."""
        block = self.fw.FWLBlock(SIZE, V, **dict(attn_chunks=2, step_size=0.5) | arguments, param_dtype=dtype)
        return FlaxBlock(block, {name: self.array(w) for name, w in weights.items()})

    def compiled(self, f):
        """Much faster than f where every operation is compiled by itself."""
        return self.jax.jit(f)

    def pull(self, f, inputs, cotangents):
        """f(*inputs) as a list, and the gradients of its sum times the cotangents."""

        @self.jax.jit
        def run(inputs, cotangents):
            outputs, pull = self.jax.vjp(lambda *a: list(f(*a)), *inputs)
            return outputs, pull(cotangents)

        outputs, gradients = run([self.array(a) for a in inputs], [self.array(c) for c in cotangents])
        return [np.asarray(a) for a in outputs], [np.asarray(g) for g in gradients]

    def pull_block(self, block, f, inputs, cotangents):
        names = list(block.weights)

        def g(*a):
            weights = dict(zip(names, a[len(inputs) :], strict=True))
            return f(FlaxBlock(block.block, weights), *a[: len(inputs)])

        return self.pull(g, [*inputs, *block.weights.values()], cotangents)


class FlaxBlock:
    def __init__(self, block, weights):
        self.block, self.weights = block, weights

    def __getattr__(self, name):
        return partial(self.block.apply, {"params": self.weights}, method=name)

    def __call__(self, *arguments):
        return self.block.apply({"params": self.weights}, *arguments)


class Keras:
    def __init__(self):
        self.backend = os.environ["KERAS_BACKEND"]
        if self.backend == "jax":
            import jax

            jax.config.update("jax_enable_x64", True)
        import keras

        import fastweights.keras as fw
        from fastweights.keras import head
        from fastweights.keras.fwl import OPS

        self.keras, self.fw, self.head, self.ops = keras, fw, head, OPS
        self.numpy = keras.ops.convert_to_numpy

    def array(self, a):
        return self.keras.ops.convert_to_tensor(a, dtype=str(a.dtype))

    def cut(self, monkeypatch, words, tokens):
        monkeypatch.setattr(self.head, "WORDS", words)

    def make(self, weights, dtype="float64", **arguments):
        block = self.fw.FWLBlock(SIZE, V, **dict(attn_chunks=2, step_size=0.5) | arguments, inputs=D, dtype=dtype)
        self.fw.import_parameters(block, weights)
        assert self.fw.export_parameters(block).keys() == weights.keys()
        return block

    def compiled(self, f):
        if self.backend != "jax":
            return f
        import jax

        return jax.jit(f)

    def pull(self, f, inputs, cotangents, variables=()):
        inputs, cotangents = [self.array(a) for a in inputs], [self.array(c) for c in cotangents]
        outputs, gradients = getattr(self, self.backend)(f, inputs, cotangents, variables)
        return [self.numpy(a) for a in outputs], [self.numpy(g) for g in gradients]

    def pull_block(self, block, f, inputs, cotangents):
        return self.pull(lambda *a: f(block, *a), inputs, cotangents, block.trainable_variables)

    def tensorflow(self, f, inputs, cotangents, variables):
        import tensorflow as tf

        of = [*inputs, *(w.value for w in variables)]

        @tf.function(autograph=False)
        def run(*inputs):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = list(f(*inputs))
                total = sum(tf.reduce_sum(a * c) for a, c in zip(outputs, cotangents, strict=True))
            return outputs, tape.gradient(total, [*inputs, *of[len(inputs) :]], unconnected_gradients="zero")

        return run(*inputs)

    def jax(self, f, inputs, cotangents, variables):
        import jax

        def call(inputs, values):
            with self.keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return list(f(*inputs))

        @jax.jit
        def run(inputs, values):
            outputs, pull = jax.vjp(call, inputs, values)
            return outputs, pull(cotangents)

        outputs, (of_inputs, of_values) = run(inputs, [w.value for w in variables])
        return outputs, [*of_inputs, *of_values]

    def torch(self, f, inputs, cotangents, variables):
        import torch

        of = [*(a.requires_grad_() for a in inputs), *(w.value for w in variables)]
        outputs = list(f(*inputs))
        total = sum((a * c).sum() for a, c in zip(outputs, cotangents, strict=True))
        gradients = torch.autograd.grad(total, of, allow_unused=True)
        gradients = [torch.zeros_like(a) if g is None else g for a, g in zip(of, gradients, strict=True)]
        return [a.detach() for a in outputs], gradients


FRAMEWORKS = {"jax": Flax, "keras": Keras}


@pytest.fixture(scope="module", params=["jax", "keras"])
def framework(request):
    if request.param not in request.config.getoption("--frameworks").split(","):
        pytest.skip("test_keras_backend runs it in another process" if request.param == "keras" else "not asked for")
    found = FRAMEWORKS[request.param]()
    yield found
    if request.param == "jax":
        found.jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def keras(framework):
    return framework if isinstance(framework, Keras) else pytest.skip("of Keras alone")


@pytest.fixture
def flax(framework):
    return framework if isinstance(framework, Flax) else pytest.skip("of Flax alone")


def skip_on_keras_jax(framework):
    if isinstance(framework, Keras) and framework.backend == "jax":
        pytest.skip("slow to compile, and the other backends run the same code, Flax the same arrays")


def in_keras(config):
    return "keras" in config.getoption("--frameworks").split(",")


@pytest.mark.parametrize("name", ["tensorflow", "torch", "jax"])
def test_keras_backend(pytestconfig, name):
    if in_keras(pytestconfig):
        pytest.skip("this process is on a backend already")
    doctests = ["--doctest-modules", "fastweights/keras/fwl.py"] if name == "torch" else []
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *doctests,
         "--frameworks", "keras", "--durations", "5"],
        env=os.environ | {"KERAS_BACKEND": name, "OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)


@pytest.mark.parametrize("name", ["torch", "jax", "keras"])
def test_examples_run(pytestconfig, name):
    if in_keras(pytestconfig):
        pytest.skip("once is enough")
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", f"examples/fwl_{name}.py"],
        env=os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                          "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    before, after = (float(line.split(": ")[1]) for line in run.stdout.splitlines())
    assert after < before - 0.2


def compare(framework, rng, *, dtype="float64", carried=0, cu_seqlens=None, **arguments):
    """Torch's block and this framework's on the same weights.  carried: tokens read before, whose state is given."""
    reference = Torch(dtype, **arguments)
    rows = B if cu_seqlens is None else 1
    x, labels, weights = problem(rng, rows, 9 if cu_seqlens is None else cu_seqlens[-1], dtype)
    state = None
    if carried:
        before = problem(rng, B if cu_seqlens is None else len(cu_seqlens) - 1, carried, dtype)
        state = reference.run(*before)[3:]
    cotangents = [rng.standard_normal(a.shape).astype(dtype) for a in reference.run(x, labels, weights, state,
                                                                                   cu_seqlens=cu_seqlens)]  # fmt: skip
    want, want_gradients = reference.run(x, labels, weights, state, cotangents, cu_seqlens)
    block = framework.make(reference.weights, dtype, **arguments)

    def run(block, x, *state):
        state = FWLState(*state) if state else None
        how = {} if cu_seqlens is None else dict(cu_seqlens=framework.array(np.asarray(cu_seqlens)))
        return flat(block.run(x, framework.array(labels), framework.array(weights), state, **how))

    got, gradients = framework.pull_block(block, run, [x, *(state or ())], cotangents)
    tolerance = {"float64": 1e-9, "float32": 1e-5}[dtype]
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_close(a, b, tolerance, name=name)
    names = ["x", *(FWLState._fields if carried else ()), *reference.weights]
    for name, a, b in zip(names, gradients, want_gradients, strict=True):
        assert_close(a, b.astype(dtype), tolerance, name=f"gradient of {name}")
    assert any(np.abs(g).max() > 1e-3 for g in want_gradients)


def test_is_torchs(framework, rng):
    compare(framework, rng)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(fast_bias=False, shared_norm_step=True, normalizer="sequence", attn_chunks=None, hidden=6, bias=False,
             first_order=True, dtype="float32"),
        dict(normalizer=5.0, decay=0.8, clip=0.2, rule="delta", carried=3, attn_chunks=4),
    ],
    ids=["published", "delta"],
)  # fmt: skip
def test_arguments(framework, rng, arguments):
    if "carried" not in arguments:
        skip_on_keras_jax(framework)
    compare(framework, rng, **arguments)


@pytest.mark.parametrize("normalizer", ["sequence", 6.0])
def test_packed(framework, rng, normalizer):
    """Documents of five tokens, one, none and eight; with a number as normaliser, from states of their own."""
    if normalizer == "sequence":
        skip_on_keras_jax(framework)
    compare(framework, rng, normalizer=normalizer, decay=0.9, cu_seqlens=[0, 5, 6, 6, 14],
            carried=3 if normalizer == 6.0 else 0)  # fmt: skip


def test_packed_documents_do_not_leak(framework, rng):
    """Another first document leaves the others' logits and states as they were."""
    skip_on_keras_jax(framework)
    block = framework.make(Torch(normalizer="sequence").weights, normalizer="sequence")
    x, labels, weights = problem(rng, 1, 14)
    cu = np.array([0, 5, 6, 6, 14])
    run = framework.compiled(lambda *a: flat(block.run(*a, cu_seqlens=cu)))
    one = [framework.numpy(a) for a in run(x, labels, weights)]
    x, labels = np.concatenate([-x[:, :5], x[:, 5:]], 1), np.concatenate([4 - labels[:, :5], labels[:, 5:]], 1)
    two = [framework.numpy(a) for a in run(x, labels, weights)]
    for name, a, b in zip(NAMES, one, two, strict=True):
        a, b = (a[0, 5:], b[0, 5:]) if name in NAMES[:3] else (a[1:], b[1:])
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert np.abs(one[0][0, 1:5] - two[0][0, 1:5]).max() > 0.01


@pytest.mark.parametrize(("words", "dtype"), [(1, "float64"), (2, "float64"), (3, "float32"), (V, "float64")])
def test_blocked_head_is_the_plain_head(framework, rng, monkeypatch, words, dtype):
    """Also where blocks do not divide the vocabulary; gradients of the loss's gradient too."""
    framework.cut(monkeypatch, words, B * T)
    n, E, c = (rng.standard_normal(s).astype(dtype) for s in ((B, T, SIZE), (SIZE, V), (V,)))
    labels = framework.array(rng.integers(V, size=(B, T)).astype("int32"))
    cotangents = [rng.standard_normal(s).astype(dtype) for s in ((B, T), (B, T, SIZE), (B, T))]
    both = lambda n, E, c: [*framework.head.head(n, E, c, labels), framework.head.loss(n, E, c, labels)]  # noqa: E731

    def plain(n, E, c):
        loss, r = fwl.plain_head(framework.ops, n, E, c, labels)
        return loss, r, loss

    got, want = (framework.pull(f, [n, E, c], cotangents) for f in (both, plain))
    for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert_close(a, b, {"float64": 1e-9, "float32": 1e-5}[dtype])


def test_loss_is_the_mean_without_logits(framework, rng, monkeypatch):
    framework.cut(monkeypatch, 2, B * T)
    block = framework.make(Torch().weights)
    x, labels, weights = problem(rng)

    def all_losses(*a):
        without = block.run(*a, logits=False)
        assert without.logits is None
        return block.run(*a).loss, without.loss, block.loss(*a)

    want, got, mean = map(framework.numpy, framework.compiled(all_losses)(x, labels, weights))
    assert_close(got, want)
    assert_close(mean, (want * weights).sum() / weights.sum())


def test_slow_logits_and_one_hot_labels(framework, rng):
    reference = Torch()
    block = framework.make(reference.weights)
    x, labels, weights = problem(rng)
    want = reference.block.slow_logits(reference.torch.tensor(x)).detach().numpy()
    assert_close(framework.numpy(framework.compiled(block.slow_logits)(x)), want)
    hot = framework.numpy(framework.compiled(lambda *a: block(*a))(x, np.eye(V)[labels], weights))
    assert_close(hot, reference.run(x, labels, weights)[0])


def test_token_by_token_equals_the_parallel_pass(framework, rng):
    """From nothing, and from the state of a parallel pass over the first tokens."""
    block = framework.make(Torch().weights, normalizer=6.0, decay=0.8, clip=0.1, rule="delta")
    x, labels, weights = problem(rng)
    weights = (weights > 0).astype("float64")
    run, step = framework.compiled(block.run), framework.compiled(block.step)
    want = [framework.numpy(a) for a in flat(run(x, labels, weights))]
    known = np.array([[1.0, 1.0, 1.0, 1.0, 0.0]] * B)  # the label of the fifth is not known yet
    for first, state in ((0, block.init_state(B)), (5, run(x[:, :5], labels[:, :5], known).state)):
        for t in range(first, T):
            label = framework.array(labels[:, t - 1]) if t else None
            logits, state = step(framework.array(x[:, t]), label, state)
            assert_close(framework.numpy(logits), want[0][:, t])
        for name, a, b in zip(FWLState._fields, state, want[3:], strict=True):
            assert_close(framework.numpy(a), b, name=name)


def test_make_labels(framework, rng):
    reference = Torch()
    tokens = np.array([[3, 1, 2, 0, 0], [1, 1, 2, 3, 4]])
    for pad_id, cu in ((None, None), (0, None), (None, [0, 2, 5]), (0, [0, 0, 2, 2, 5, 5])):
        rows = tokens if cu is None else tokens[1:]
        how = {} if cu is None else dict(cu_seqlens=np.array(cu))
        got = framework.fw.make_labels(rows, pad_id, **how)
        want = reference.make_labels(reference.torch.tensor(rows), pad_id,
                                     **{n: reference.torch.tensor(a) for n, a in how.items()})  # fmt: skip
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(framework.numpy(a), b.numpy())


CALLS = [
    (lambda x, y, w: (x, y + V, w), "labels has .*; expected 0 to 4: vocab_size is 5"),
    (lambda x, y, w: (x, y - V, w), "labels has -5; expected 0 to 4"),
    (lambda x, y, w: (x, np.zeros((B, T, 6)), w), r"labels has shape \(2, 9, 6\); expected \(B, T, 5\) for one-hot"),
    (lambda x, y, w: (x, y[:, :3], w), r"labels has shape \(2, 3\); expected \(2, 9\): one per token of x"),
    (lambda x, y, w: (x, y[:, 0], w), r"labels has shape \(2,\); expected \(2, 9\): one per token of x"),
    (lambda x, y, w: (x, y, w[:1]), r"weights has shape \(1, 9\); expected \(2, 9\)"),
    (lambda x, y, w: (x, y, -w), "weights has -.*; expected finite numbers of at least 0"),
    (lambda x, y, w: (x, y, w * np.nan), "weights has nan; expected finite numbers of at least 0"),
    (lambda x, y, w: (x[..., :2], y, w), r"x has shape \(2, 9, 2\); expected \(B, T, 3\)"),
]


@pytest.mark.parametrize(("change", "message"), CALLS)
def test_call_errors(framework, rng, change, message):
    block = framework.make(Torch().weights)
    with pytest.raises(FastWeightError, match=message):
        block.run(*change(*problem(rng)))


def test_other_errors(framework, rng):
    make, weights, cls = framework.make, Torch().weights, framework.fw.FWLBlock
    block = make(weights, normalizer=4.0)
    with pytest.raises(FastWeightError, match=r"state.dense1 has shape \(3, 1, 4, 16\); expected \(2, 1, 4, 16\): x"):
        block.run(*problem(rng), state=block.init_state(3))
    with pytest.raises(FastWeightError, match=r"expected \(2, 1, 5, 16\): the state of another block"):
        block.step(rng.standard_normal((B, D + 1)), None, block.init_state(B))
    with pytest.raises(FastWeightError, match="normalizer is 'batch'; expected a number of tokens for step"):
        make(weights).step(rng.standard_normal((B, D)), None, block.init_state(B))
    with pytest.raises(FastWeightError, match="normalizer is 'mean'; expected 'batch', 'sequence' or a number"):
        cls(SIZE, V, normalizer="mean")
    with pytest.raises(FastWeightError, match="inputs is not known yet; expected FWLBlock"):
        cls(SIZE, V).init_state(2)
    assert repr(cls(SIZE, V)) == "FWLBlock(4, 5, attn_chunks=None, normalizer='batch', rule='sum')"


def test_flax_brute_force(flax, rng):
    """Logits of token t: a slow forward with parameters minus steps times gradients of the losses before t."""
    jax, jnp = flax.jax, flax.jax.numpy
    block = flax.make(Torch().weights)
    x, labels, weights = problem(rng)

    def slow(p, x):
        h = jnp.maximum(x @ p["dense1"] + p["bias1"], 0) ** 2 @ p["dense2"] + p["bias2"]
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
        return (h * p["scale"] + p["shift"]) @ p["unembed"] + p["unembed_bias"]

    @jax.jit
    def at(p, x, labels, weights, t):
        fast = {name: p[name] for name in STEPS}

        def total(fast):
            scores = jax.nn.log_softmax(slow(p | fast, x))
            losses = -jnp.take_along_axis(scores, labels[:, None], 1)[:, 0]
            return jnp.sum(losses * weights * (jnp.arange(T) < t))

        change = jax.grad(total)(fast)
        now = {name: w - p["steps"][i] * change[name] for i, (name, w) in enumerate(fast.items())}
        return slow(p | now, x[t])

    share = weights / weights.sum()
    want = [[at(block.weights, x[i], labels[i], share[i], t) for t in range(T)] for i in range(B)]
    got = block(x, labels, weights)
    assert_close(np.asarray(got), np.asarray(want))
    assert np.abs(got - block.slow_logits(x)).max() > 0.01  # the updates matter here


def test_flax_under_jit_grad_and_vmap(flax, rng):
    jax = flax.jax
    block = flax.make(Torch(normalizer=6.0).weights, normalizer=6.0)
    x, labels, weights = problem(rng)
    row = lambda *a: block(*(y[None] for y in a))[0]  # noqa: E731
    whole, rows = jax.jit(lambda *a: (block(*a), jax.vmap(row)(*a)))(x, labels, weights)
    assert_close(np.asarray(rows), np.asarray(whole))
    with pytest.raises(FastWeightError, match="labels has 9"):  # values are seen under grad alone
        jax.grad(block.loss)(jax.numpy.asarray(x), labels * 0 + 9, weights)


def test_flax_loss_never_holds_the_logits(flax, rng, monkeypatch):
    """With 50 blocks nothing as large as a tenth of the logits is made, forwards or backwards."""
    jax, vocabulary, tokens = flax.jax, 5000, 64
    monkeypatch.setattr(flax.head, "BLOCK", tokens * 100)
    block = flax.fw.FWLBlock(4, vocabulary)
    x, labels, weights = np.ones((1, tokens, D), "float32"), np.zeros((1, tokens), int), np.ones((1, tokens))
    variables = jax.eval_shape(block.init, jax.random.key(0), x, labels, weights)
    run = jax.grad(lambda p: block.apply(p, x, labels, weights, method="loss"))

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
            for inner in jax.core.jaxprs_in_params(equation.params):
                yield from sizes(inner)

    largest = max(sizes(jax.make_jaxpr(run)(variables).jaxpr))
    assert 4 * vocabulary <= largest <= tokens * vocabulary / 10  # the gradient of the embedding is seen


def test_flax_init_and_sharing(flax, rng):
    import flax.linen as nn

    jax, fw, key = flax.jax, flax.fw, flax.jax.random.key(0)
    x, labels, weights = problem(rng, dtype="float32")
    block = fw.FWLBlock(SIZE, V)
    found = jax.eval_shape(block.init, key, x, labels, weights)
    assert {name: a.shape for name, a in found["params"].items()} == block.config.shapes(D)
    variables = jax.jit(lambda: block.init(key, x, method="slow_logits"))()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), variables) == jax.tree.map(lambda a: (a.shape, a.dtype), found)
    np.testing.assert_allclose(variables["params"]["steps"], 0.01)
    state = block.apply(variables, B, method="init_state")
    assert [a.shape for a in state] == [a.shape for a in fw.FWLBlock(SIZE, V, inputs=D).init_state(B)]

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens, labels, weights):
            embed = nn.Embed(V, SIZE)
            return fw.FWLBlock(SIZE, V, unembed=embed)(embed(tokens), labels, weights)

    params = jax.eval_shape(Model().init, key, labels, labels, weights)["params"]
    assert not {"unembed", "unembed_bias"} & params["FWLBlock_0"].keys()
    params = jax.tree.map(lambda a: rng.standard_normal(a.shape).astype("float32"), params)

    @jax.jit
    def both(params):
        E = params["Embed_0"]["embedding"]
        separate = params["FWLBlock_0"] | dict(unembed=E.T, unembed_bias=np.zeros(V, "float32"))
        two = block.apply({"params": separate}, E[labels], labels, weights)
        return Model().apply({"params": params}, labels, labels, weights), two

    one, two = both(params)
    assert_close(np.asarray(one), np.asarray(two), 1e-6)
    with pytest.raises(FastWeightError, match=r"unembed has shape \(4, 5\); expected \(5, 4\)"):
        fw.FWLBlock(SIZE, V, unembed=nn.Embed(SIZE, V))


def test_flax_bfloat16(flax, rng):
    x, labels, weights = problem(rng, dtype="float32")
    params = {n: w.astype("float32") for n, w in Torch(step_size=0.05).weights.items()}
    apply = lambda dtype: flax.fw.FWLBlock(SIZE, V, dtype=dtype).apply({"params": params}, x, labels, weights)  # noqa: E731
    want, got = flax.jax.jit(lambda: (apply(None), apply("bfloat16")))()
    assert got.dtype == "bfloat16"
    assert np.abs(np.asarray(got, "float32") - np.asarray(want)).max() < 0.1 * np.abs(want).max()


def test_keras_trains_and_is_saved(keras, rng, tmp_path):
    """A model whose length is unknown, labels made inside it; the tied embedding is still one after loading."""
    k, fw = keras.keras, keras.fw
    tokens = k.Input((None,), dtype="int32")
    labels, weights = fw.make_labels(tokens)
    embed = k.layers.Embedding(V, SIZE)
    x = embed(tokens)
    tied = fw.FWLBlock(SIZE, V, 2, hidden=6, unembed=embed, decay=0.9, normalizer=4.0)
    logits = tied(x, labels, weights)
    model = k.Model(tokens, logits)
    assert logits.shape == (None, None, V)
    model.compile(k.optimizers.Adam(0.01), k.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = rng.integers(V, size=(4, 7)).astype("int32")
    y, w = (keras.numpy(a) for a in fw.make_labels(data))
    first, *_, last = (model.train_on_batch(data, y, sample_weight=w) for _ in range(20))
    assert last < first - 0.02
    model.save(tmp_path / "model.keras")
    loaded = k.models.load_model(tmp_path / "model.keras")
    one, two = (keras.numpy(keras.compiled(lambda t, m=m: m(t))(data)) for m in (model, loaded))
    np.testing.assert_array_equal(one, two)
    again = next(layer for layer in loaded.layers if getattr(layer, "unembed", None) is not None)
    assert any(layer is again.unembed for layer in loaded.layers)
    assert again.config == tied.config
    assert "unembed_bias" not in again.slow_weights
    assert len(loaded.trainable_variables) == len(model.trainable_variables)


def test_keras_length_unknown_to_a_graph(keras, rng):
    if keras.backend != "tensorflow":
        pytest.skip("of TensorFlow alone")
    import tensorflow as tf

    block = keras.make(Torch(normalizer="sequence").weights, normalizer="sequence")
    x, labels, weights = problem(rng)
    spec = [tf.TensorSpec((None, None, D), "float64"), tf.TensorSpec((None, None), "int64"),
            tf.TensorSpec((None, None), "float64")]  # fmt: skip
    compiled = tf.function(lambda *a: flat(block.run(*a)), input_signature=spec, autograph=False)
    for t in (1, 4, T):
        cut = x[:, :t], labels[:, :t], weights[:, :t]
        for a, b in zip(compiled(*map(tf.constant, cut)), flat(block.run(*cut)), strict=True):
            assert_close(a.numpy(), b.numpy())


def test_keras_config_and_policies(keras, rng):
    k, fw = keras.keras, keras.fw
    block = fw.FWLBlock(SIZE, V, 3, inputs=D, clip=0.5, rule="delta", first_order=True, bias=False, name="top")
    again = fw.FWLBlock.from_config(block.get_config())
    assert again.get_config() == block.get_config()
    assert (again.config, again.inputs, again.bias, again.name) == (block.config, D, False, "top")
    x, labels, weights = problem(rng, dtype="float32")
    mixed = fw.FWLBlock(SIZE, V, dtype="mixed_bfloat16", normalizer=6.0)
    mixed.build((B, T, D))
    out = keras.compiled(mixed.run)(x, labels, weights)
    assert k.backend.standardize_dtype(out.logits.dtype) == "bfloat16"
    assert [k.backend.standardize_dtype(a.dtype) for a in (out.loss, out.state.dense1)] == ["float32"] * 2
    logits, _ = keras.compiled(lambda x, state: mixed.step(x, None, state))(x[:, 0], mixed.init_state(B))
    assert logits.shape == (B, V)
    with pytest.raises(FastWeightError, match=r"unembed has shape \(4, 5\); expected \(5, 4\)"):
        fw.FWLBlock(SIZE, V, unembed=k.layers.Embedding(SIZE, V))
    with pytest.raises(FastWeightError, match=r"x has shape \(2, 9, 3\); expected \(B, T, 7\)"):
        fw.FWLBlock(SIZE, V, inputs=7)(x, labels, weights)
