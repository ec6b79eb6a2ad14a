"""The small model of released steps with states in host memory, and comparisons of its runs."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._model.states.layout import Stacks
from tests.shared import tiny_lm

LAYERS = 4
# With the older emitters of XLA:CPU, which the suite uses, a fusion of two programs may round equal
# operations differently. Bits are compared as users have them, or where a program cannot choose the
# newer emitters, without fusions.
ALIKE = {
    (0, 10): {"xla_cpu_use_fusion_emitters": True},
    (0, 11): {"xla_disable_hlo_passes": "fusion"},
}.get(jax.__version_info__[:2])


def parameters():
    return tiny_lm.parameters(np.float32, layers=LAYERS, width=32, vocab=64)


def apart(params):
    """Returns the function of a layer's parameters, and the parameters outside the layers."""
    outer = {k: v for k, v in params.items() if k != "blocks"}
    return lambda i: jax.tree.map(lambda a: a[i], params["blocks"]), outer


def tokens(seed):
    return tiny_lm.tokens(8, seed, vocab=64).astype(jnp.int32)


def train(step, state, steps, key=None, options=None):
    """Returns the joined state and metrics after some steps, as NumPy arrays, and the places."""
    call, found = jax.jit(step, donate_argnums=0, compiler_options=options), []
    for seed in range(steps):
        state, metrics = call(state, tokens(seed), *(() if key is None else (key,)))
        found.append(metrics)
    kinds = places(state)
    return jax.tree.map(np.asarray, (step.joined(state), found)), kinds


def places(state) -> list[set[str]]:
    """Returns, for each stack, the set of memories of the layers' arrays. Adam's moments count
    too.
    """
    params, moments = state
    adam = (moments.mu, moments.nu) if hasattr(moments, "mu") else ()
    trees = [t["blocks"] for t in (params, *adam)]
    stacks = zip(*(t.parts if isinstance(t, Stacks) else (t,) for t in trees))
    return [{a.sharding.memory_kind for a in jax.tree.leaves(stack)} for stack in stacks]


def host_bytes(tree) -> int:
    """Returns the bytes of the arrays, or of the shapes, in host memory."""
    kind = lambda a: a.sharding and a.sharding.memory_kind
    host = [a for a in jax.tree.leaves(tree) if kind(a) == "pinned_host"]
    return sum(a.size * a.dtype.itemsize for a in host)


def split_at(persist) -> list[set[str]]:
    """Returns the places of layers if the first `persist` layers are resident and others stream."""
    return [{"device"}, {"pinned_host"}][persist == 0 :]


def on_device(tree):
    """Returns the arrays in device memory, with their split unchanged."""
    return jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind("device")), tree)


def no_bit_depends(step, persist, steps):
    """Asserts that a streamed state trains as the same split does in device memory, bit for bit.
    The mean of microbatches' losses may round differently.
    """
    state = lambda: step.split(step.init(parameters()), persist)
    (found, metrics), kinds = train(step, state(), steps, options=ALIKE)
    assert kinds == split_at(persist)
    near = step.init(parameters()) if persist == 0 else on_device(state())
    (same, others), kinds = train(step, near, steps, options=ALIKE)
    assert set().union(*kinds) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, found, same)
    close(metrics, others)


def moved(params) -> float:
    """Returns the smallest change of an array."""
    by = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), params, parameters())
    return min(jax.tree.leaves(by))


def close(got, want, rtol=1e-6):
    """Asserts that arrays are equal within `rtol` of each array's largest value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1e-3, np.abs(b).max()))
