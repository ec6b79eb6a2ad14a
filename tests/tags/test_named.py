"""Values that `checkpoint_name` names: a policy of ours may compress them, and every other policy
does what it did.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval

import jaxmem
from jaxmem._core.actions import Choice
from jaxmem._core.assignment import Assignment
from jaxmem._model.tags.primitive import let_names_be_encoded, name_p
from jaxmem.errors import TagError
from tests.shared import models
from tests.shared.compare import farthest

RULES = partial_eval.partial_eval_jaxpr_custom_rules
words = jax.checkpoint_policies
OFFLOADING = words.save_and_offload_only_these_names(
    names_which_can_be_saved=["b"],
    names_which_can_be_offloaded=["a", "c"],
    offload_src="device",
    offload_dst="pinned_host",
)
# What others give to `jax.checkpoint`, and JAX carries out by itself.
FOREIGN = {
    "names": words.save_only_these_names("a", "c"),
    "others": words.save_any_names_but_these("a"),
    "everything": words.everything_saveable,
    "nothing": words.nothing_saveable,
    "products": words.dots_saveable,
    "both": words.save_from_both_policies(words.dots_saveable, words.save_only_these_names("a")),
}


@pytest.fixture
def without_rule():
    """Leaves the rule out while a test runs, as in a process that compresses nothing."""
    rule = RULES.pop(name_p, None)
    jax.clear_caches()
    yield
    RULES.pop(name_p, None)
    if rule is not None:
        RULES[name_p] = rule
    jax.clear_caches()


def layer(x, w):
    """Names in the block, and one of them in a loop of it too."""
    a = checkpoint_name(jnp.sin(x @ w), "a")
    b = checkpoint_name(jnp.cos(a @ w), "b")

    def step(c, row):
        c = checkpoint_name(jnp.tanh(c * row), "a")
        return c, c

    _, rows = jax.lax.scan(step, b[0], b)
    return x + checkpoint_name(jnp.sin(rows), "c")


def gradient(policy):
    def loss(x, ws):
        one = jax.checkpoint(layer, policy=policy)
        y = one(jax.lax.scan(lambda x, w: (one(x, w), None), x, ws)[0], ws[0])
        return y.sum()

    return jax.grad(loss, argnums=(0, 1))


ARGS = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)


def programs(policy) -> tuple[str, str]:
    """The gradient's jaxpr, and that of a derivative of it, without addresses."""
    first = gradient(policy)
    second = lambda x, ws: jax.jvp(lambda x: first(x, ws)[0], (x,), (x,))
    text = lambda f: re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*ARGS)))
    return text(first), text(second)


@pytest.mark.parametrize("policy", FOREIGN.values(), ids=FOREIGN)
def test_programs_under_other_policies_are_the_same_to_the_letter(without_rule, policy):
    before = programs(policy)
    let_names_be_encoded()
    jax.clear_caches()
    assert programs(policy) == before
    assert "name=a" in before[0]


def test_a_policy_that_offloads_compiles_to_the_same_program(without_rule):
    """XLA inlines the call that the copies stand in."""

    def compiled():
        made = jax.jit(gradient(OFFLOADING)).lower(*ARGS).compile()
        # Numbers of instructions depend on what the process compiled before.
        text = re.sub(r"metadata=\{[^}]*\}|, stack_frame_id=\d+", "", made.as_text())
        text = re.sub(r"([A-Za-z_][\w-]*)(?:\.\d+)+", r"\1", text)  # of names, and not of values
        return text.split("FileNames")[0], made.memory_analysis().temp_size_in_bytes

    before = compiled()
    spaces = lambda: re.findall(
        r"f32<host>\[[\d,]*\]", str(jax.make_jaxpr(gradient(OFFLOADING))(*ARGS))
    )
    hosted = set(spaces())
    let_names_be_encoded()
    jax.clear_caches()
    assert compiled() == before
    assert set(spaces()) == hosted != set()


@pytest.mark.parametrize("action", ["offload", "compress", "compress_offload"])
def test_the_rule_is_there_once_a_policy_compresses_or_offloads(without_rule, action):
    for plan in (None, models.draft("keep"), models.draft("recompute")):
        jaxmem.remat_policy(plan)
        assert name_p not in RULES
    jaxmem.remat_policy(models.draft(action))
    assert name_p in RULES


def spun(x):
    return jnp.abs(jnp.sin(checkpoint_name(jnp.exp(jax.lax.complex(x, x)), "spun"))).sum()


@pytest.mark.todays_checkpoint
def test_a_complex_value_is_stored_where_the_rule_is_and_else_refused(without_rule):
    x = jnp.linspace(0.1, 1, 8)
    of = lambda plan: jax.grad(jax.checkpoint(spun, policy=jaxmem.remat_policy(plan)))
    gradient = lambda plan: jax.jit(of(plan))(x)
    want = jax.jit(jax.grad(spun))(x)
    assert np.abs(want).min() > 0
    stored = Assignment({"block": {"spun": "keep"}})
    for plan in (None, Assignment.nothing()):  # both recompute it
        np.testing.assert_allclose(gradient(plan), want, rtol=1e-12)
    said = r"value 'spun' that is complex128, and the plan says keep.*jaxmem\.tag"
    with pytest.raises(TagError, match=said):
        gradient(stored)
    offloaded = Assignment({"block": {"spun": "offload"}})
    np.testing.assert_allclose(gradient(offloaded), want, rtol=1e-12)
    jax.clear_caches()
    np.testing.assert_allclose(gradient(stored), want, rtol=1e-12)


def block(x, p, key):
    return x + jnp.sin(checkpoint_name(jnp.sin(x @ p["up"]), "h")) @ p["down"]


def tagged(x, p, key):
    return x + jnp.sin(jaxmem.tag(jnp.sin(x @ p["up"]), "h")) @ p["down"]


@functools.cache
def gradients(block, choice):
    policy = None if choice is None else jaxmem.remat_policy(Assignment({"block": {"h": choice}}))
    p, x = models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)
    return jax.jit(jax.value_and_grad(models.scanned(policy, block), argnums=(0, 1)))(p, x)


@pytest.mark.parametrize("action", ["compress", "compress_offload"])
def test_a_compressed_name_is_a_compressed_tag(action):
    choice = Choice(action, models.CODEC["in"])
    got, want = gradients(block, choice), gradients(tagged, choice)
    plain = gradients(block, None)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-12), got, want)
    assert got[0] == plain[0], "the forward is exact"
    assert farthest(got[1], plain[1]) > 1e-6, "the codes are what the backward reads"
