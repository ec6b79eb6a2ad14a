"""The Llama: published sizes, the layer and the loss of a spelling in NumPy, exact gradients under
its tags, and the same step however its layers are looped over.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
import jaxmem.ops
from experiments.command.load import load
from experiments.models import llama
from experiments.models.loops import scanned
from experiments.running.policies import LLAMA_KINDS
from experiments.steps.step import make_loss
from jaxmem.plans import Action, Assignment, Choice
from tests.experiments.states import first_state, tags, tokens
from tests.shared import llama_oracle
from tests.shared.compare import close

MICRO = (
    "model.layers=2", "model.width=32", "model.hidden=40", "train.batch=2", "train.sequence=12",
    "train.loss_chunk=4",
)  # fmt: skip
EXACT = "model.dtype=float64"
FUSED = "model.attention=fused"
SHAPES = [  # heads are 4
    ("model.kv_heads=2",),
    ("model.kv_heads=2", FUSED),
    ("model.kv_heads=1", "model.tied=true", "model.rope_base=1e6"),
    ("model.kv_heads=4", "model.rope_base=100.0"),
]


def micro(*overrides):
    return load("llama_nano", (*MICRO, *overrides))


@pytest.fixture
def in_64_bits():
    """Beside the module's marker; its fixture sets it back."""
    jax.config.update("jax_enable_x64", True)


@pytest.mark.quick(
    "model.kv_heads=1 model.tied=true model.rope_base=1e6", "model.kv_heads=2 model.attention=fused"
)
@pytest.mark.core
@pytest.mark.parametrize("overrides", SHAPES, ids=" ".join)
def test_a_layer_and_the_loss_are_numpys(overrides, in_64_bits):
    config = micro(EXACT, *overrides)
    model, params = config.model, first_state(config, shaken=0.2).params
    plain, how = jax.tree.map(np.asarray, params), (model.heads, model.rope_base)
    own, first = (jax.tree.map(lambda a: a[0], tree["blocks"]) for tree in (params, plain))
    near = 1e-5 if FUSED in overrides else 1e-11  # JAX's attention has a softmax in float32
    x_BSD = np.random.default_rng(1).normal(size=(2, 12, 32))
    got = jax.jit(llama.split(config).layer)(own, x_BSD)
    want = np.stack([llama_oracle.block(x_SD, first, *how) for x_SD in x_BSD])
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=near, atol=near)
    text = tokens(config)
    want = llama_oracle.loss(plain, text, *how)
    np.testing.assert_allclose(jax.jit(make_loss(config))(params, text), want, rtol=near)


def gradient(config, params, loop=None):
    return jax.jit(jax.grad(make_loss(config, loop)))(params, tokens(config))


def untagged(monkeypatch):
    """Takes out every tag and every checkpoint."""
    monkeypatch.setattr(jaxmem, "tag", lambda x, *_, **__: x)
    monkeypatch.setattr(jaxmem.ops, "softmax", lambda x, _: jax.nn.softmax(x))
    monkeypatch.setattr(jaxmem.ops, "sigmoid", lambda x, *_, **__: jax.nn.sigmoid(x))
    monkeypatch.setattr(jax, "checkpoint", lambda f, **_: f)


@pytest.mark.quick("None", "kept2")
@pytest.mark.core
@pytest.mark.standard_promotion
@pytest.mark.parametrize("kept", [None, (), tuple(LLAMA_KINDS), ("q", "sigmoid", "glu")])
def test_tags_change_no_gradient(kept, in_64_bits, monkeypatch):
    config = micro(EXACT)
    params = first_state(config, shaken=0.2).params
    plan = None if kept is None else Assignment(others=dict.fromkeys(kept, Choice(Action.KEEP)))
    got = gradient(config, params, scanned(jaxmem.remat_policy(plan)))
    untagged(monkeypatch)
    close(got, gradient(config, params))


@pytest.mark.standard_promotion
def test_every_parameter_of_every_layer_has_the_gradient_of_numpys_loss(in_64_bits):
    """Along a random direction in each array, by differences of 1e-5."""
    config = micro(EXACT, "train.batch=1", "train.sequence=6", "train.loss_chunk=2")
    state, text, rng = first_state(config, shaken=0.2), tokens(config), np.random.default_rng(2)
    grads, how = gradient(config, state.params), (config.model.heads, config.model.rope_base)
    plain = jax.tree.map(np.array, state.params)
    for path, array in jax.tree_util.tree_leaves_with_path(plain):
        found = functools.reduce(lambda tree, part: tree[part.key], path, grads)
        stacked = path[0].key == "blocks"
        for part, found_part in zip(array, found) if stacked else [(array, found)]:
            direction = rng.normal(size=part.shape)
            values = []
            for step in (1e-5, -2e-5):
                part += step * direction
                values.append(llama_oracle.loss(plain, text, *how))
            part += 1e-5 * direction
            slope = (values[0] - values[1]) / 2e-5
            assert abs(slope) > 1e-6, path
            np.testing.assert_allclose(np.vdot(found_part, direction), slope, rtol=1e-5)


def test_tags_are_the_operands_that_the_backward_reads():
    assert tags(micro()) == LLAMA_KINDS
