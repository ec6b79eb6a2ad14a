"""What tests of experiments share: first states drawn by NumPy, which need not be compiled, and
what a named policy saves.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models import registry as models
from experiments.models.loops import scanned
from experiments.running import policies
from experiments.steps.step import State, abstract, init_state, make_loss, make_step
from tests.shared.options import options

FIXED = {"scale": np.ones, "bias": np.zeros, "mean": np.zeros, "variance": np.ones}


def parameters(create, seed: int = 0, shaken: float = 0.0):
    """Arrays of the shapes of `create(key)`; `shaken`: the deviation of what is added to each, so
    that none is near zero.
    """
    rng = np.random.default_rng(seed)

    def draw(path, a):
        fixed = FIXED.get(path[-1].key)
        values = rng.normal(0, 0.02, a.shape) if fixed is None else fixed(a.shape)
        return jnp.asarray((values + shaken * rng.normal(size=a.shape)).astype(a.dtype))

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(create, jax.random.key(0)))


def first_state(config, seed: int = 0, shaken: float = 0.0) -> State:
    """What `init_state` makes, but for the draws (tests/experiments/models/test_gpt.py)."""
    shapes = jax.eval_shape(functools.partial(init_state, config))
    params = parameters(functools.partial(models.create, config), seed, shaken)
    zeros = jax.tree.map(lambda a: jnp.asarray(np.zeros(a.shape, a.dtype)), shapes)
    key = jnp.asarray(np.arange(1, 1 + shapes.key.size, dtype=np.uint32))
    return State(params, zeros.moments, zeros.step, key)


def tokens(config, seed: int = 0):
    """Random bytes of a batch, as the model's data."""
    shape = config.train.batch, config.train.sequence + 1
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.int32)


def tags(config) -> dict[str, str]:
    """The kind of each tag in the traced step, by name."""
    text = str(jax.make_jaxpr(make_step(config))(*abstract(config)))
    of = lambda key, tag: re.search(rf"{key}=(\w+)", tag)[1]
    found = re.findall(r"jaxmem_tag\[[^\]]*\]", text)
    return {of("name", tag): of("kind", tag) for tag in found}


def saved_by_policy(config) -> int:
    """Bytes, in whatever memory, that the forward hands to the backward under a config's policy."""
    (candidate,) = policies.candidates(config)
    loss = make_loss(config, scanned(candidate.policy, candidate.every))
    state, text = abstract(config)

    def backward(params):
        tokens = jnp.zeros(text.shape, text.dtype)
        return jax.vjp(lambda p: loss(p, tokens, jax.random.key(0)), params)[1]

    kept = jax.eval_shape(backward, state.params)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(kept))


def read_run(out):
    """The summary and the rows that a run left in a folder."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), rows


def user_numerics():
    """What the marker `jax_defaults` stands for, for a fixture that serves a whole module."""
    return options(jax_enable_x64=False, jax_numpy_dtype_promotion="standard")
