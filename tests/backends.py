"""The frameworks under one roof: NumPy in, NumPy out, for the tests that hold all of them to the same thing."""

import os

import numpy as np

from fastweights.debugging import debugging


class Torch:
    def __init__(self):
        import torch

        import fastweights.torch as fw

        self.torch, self.fast_weight = torch, fw.fast_weight
        self.feature_map = lambda x, *a, **how: fw.feature_map(self.array(x), *a, **how).numpy()

    def array(self, x):
        return self.torch.tensor(x)

    def run(self, args, **how):
        how |= {n: self.array(how[n]) for n in ("cu_seqlens", "mask") if how.get(n) is not None}
        o, S = self.fast_weight(**{n: self.array(x) for n, x in args.items()}, **how)
        return o.numpy(), S.numpy()

    def gradients(self, args, do, dS, **how):
        x = {n: self.array(a).requires_grad_() for n, a in args.items()}
        outputs = self.fast_weight(**x, **how)
        grads = self.torch.autograd.grad(outputs, list(x.values()), [self.array(do), self.array(dS)])
        return {n: g.numpy() for n, g in zip(x, grads, strict=True)}


class Jax:
    def __init__(self):
        import jax

        import fastweights.jax as fw

        jax.config.update("jax_enable_x64", True)
        self.jax, self.fast_weight = jax, fw.fast_weight
        self.feature_map = lambda x, *a, **how: np.asarray(fw.feature_map(self.array(x), *a, **how))

    def array(self, x):
        return self.jax.numpy.asarray(x)

    def run(self, args, **how):
        arrays = {n: self.array(how.pop(n)) for n in ("cu_seqlens", "mask") if how.get(n) is not None}
        call = lambda a, b: self.fast_weight(**a, **b, **how)  # noqa: E731
        o, S = call({n: self.array(x) for n, x in args.items()}, arrays)
        return np.asarray(o), np.asarray(S)

    def gradients(self, args, do, dS, **how):
        call = lambda x: self.fast_weight(**x, **how)  # noqa: E731
        _, pull = self.jax.vjp(call, {n: self.array(x) for n, x in args.items()})
        return {n: np.asarray(g) for n, g in pull((self.array(do), self.array(dS)))[0].items()}


class Keras:
    """On the backend that KERAS_BACKEND names; one per process."""

    def __init__(self):
        if os.environ.get("KERAS_BACKEND") == "jax":
            import jax

            jax.config.update("jax_enable_x64", True)
        import keras

        import fastweights.keras as fw

        self.keras, self.fast_weight = keras, fw.fast_weight
        self.feature_map = lambda x, *a, **how: self.numpy(fw.feature_map(self.array(x), *a, **how))

    def array(self, x):
        return self.keras.ops.convert_to_tensor(x, dtype=str(x.dtype))

    def numpy(self, x):
        return self.keras.ops.convert_to_numpy(x)

    def run(self, args, **how):
        how |= {n: self.array(how[n]) for n in ("cu_seqlens", "mask") if how.get(n) is not None}
        call = lambda x: self.fast_weight(**x, **how)  # noqa: E731
        compiled = not debugging() and how.get("cu_seqlens") is None  # values are not looked at in a compiled function
        if self.keras.backend.backend() == "jax" and compiled:  # operation by operation takes longer
            import jax

            call = jax.jit(call)
        o, S = call({n: self.array(x) for n, x in args.items()})
        return self.numpy(o), self.numpy(S)

    def gradients(self, args, do, dS, **how):
        x = {n: self.array(a) for n, a in args.items()}
        return {n: self.numpy(g) for n, g in self._pull(x, self.array(do), self.array(dS), how).items()}

    def _pull(self, x, do, dS, how):
        backend = self.keras.backend.backend()
        if backend == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = self.fast_weight(**x, **how)
            return tape.gradient(outputs, x, output_gradients=(do, dS))
        if backend == "jax":
            import jax

            call = lambda x: self.fast_weight(**x, **how)  # noqa: E731
            return jax.jit(lambda x, up: jax.vjp(call, x)[1](up)[0])(x, (do, dS))
        import torch

        x = {n: a.requires_grad_() for n, a in x.items()}
        grads = torch.autograd.grad(self.fast_weight(**x, **how), list(x.values()), [do, dS])
        return dict(zip(x, grads, strict=True))


FRAMEWORKS = {"torch": Torch, "jax": Jax, "keras": Keras}
