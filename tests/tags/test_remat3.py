"""Tags under JAX's next checkpoint, the option `jax_remat3`: in each test the blocks are traced
with the option off and with the option on.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import Offloadable, checkpoint_name

import jaxmem
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._model.auto.found_layers import found_layers
from jaxmem._model.tags.policy import Policy
from jaxmem._model.tags.primitive import tag_p
from jaxmem._trace.jaxpr import equations, hijax_params, inside
from jaxmem.errors import TagError
from tests.shared import models
from tests.shared.compare import close
from tests.shared.remat3 import both, needed, options
from tests.tags import test_tag

pytestmark = [pytest.mark.todays_checkpoint, needed]
ACTIONS = ("keep", "recompute", "offload", "compress", "compress_offload")
each_action = pytest.mark.parametrize("action", ACTIONS)
SAVE = jax.checkpoint_policies.save_only_these_names


def equal(make, *arguments, rtol=1e-12, also: tuple[str, ...] = ()):
    """Asserts that the function that `make()` returns has equal results, traced with the option off
    and with the option on. Returns the results.
    """
    off = jax.jit(make())(*arguments)
    with options("jax_remat3", *also):
        on = jax.jit(make())(*arguments)
    close(on, off, rtol)
    return on


def inputs():
    return models.parameters(dtype=jnp.float64), models.batch(dtype=jnp.float64)


def policy(action):
    return jaxmem.remat_policy(models.draft(action))


@pytest.mark.parametrize("form", [models.scanned, models.unrolled])
@each_action
def test_gradients_are_equal(form, action):
    make = lambda: jax.value_and_grad(form(policy(action)), argnums=(0, 1))
    equal(make, *inputs())


@each_action
def test_equal_bytes_are_stored(action):
    off = test_tag.residual_bytes(policy(action))
    with options("jax_remat3"):
        assert test_tag.residual_bytes(policy(action)) == off


@pytest.mark.parametrize("action", ["keep", "recompute", "offload"])
@pytest.mark.parametrize(
    "law", [test_tag.test_gradient_of_gradient, test_tag.test_complex_values_are_stored]
)
def test_costly_laws_of_tags_hold(law, action):
    """`make REMAT3=1 test-core` runs the quick laws with the option on, and not the costly ones."""
    test_tag.second.cache_clear()
    with options("jax_remat3"):
        law(action)
    test_tag.second.cache_clear()


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["", "jit"])
@pytest.mark.parametrize("action", ["keep", "compress"])
def test_vmap_of_gradients(action, jit):
    p, _ = inputs()
    one = lambda loss: jit(lambda x: jax.grad(loss)(p, x[None]))
    make = lambda: jax.vmap(one(models.scanned(policy(action))))
    equal(make, models.batch(4, dtype=jnp.float64), rtol=1e-9)


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    p, x = inputs()
    make = lambda: jax.grad(models.scanned(policy("compress"), models.narrow))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, jax.sharding.PartitionSpec("data"))
        equal(make, p, rows)


def test_a_kept_value_is_rounded_to_its_own_precision():
    """XLA could otherwise store the value in float32."""
    p, x = models.parameters(dtype=jnp.bfloat16), models.batch(dtype=jnp.bfloat16)
    gradient = lambda: jax.grad(models.unrolled(policy("keep"), models.narrow))
    rounded = lambda: str(jax.make_jaxpr(gradient())(p, x)).count("reduce_precision")
    off = rounded()
    assert off > 0
    with options("jax_remat3"):
        assert rounded() == off


def plain(stored):
    """A loss with one block, whose tag has the name "y"."""
    block = jax.checkpoint(lambda x: jnp.sin(jaxmem.tag(jnp.exp(x), "y")), policy=stored)
    return jax.grad(lambda x: block(x).sum())


def test_a_checkpoint_without_a_policy_recomputes_a_tag():
    x = jnp.linspace(0.1, 1, 16)
    on = equal(lambda: plain(None), x)
    assert np.abs(on).min() > 0


def test_a_policy_of_the_user_offloads_a_tag():
    x = jnp.linspace(0.1, 1, 16)
    away = lambda primitive, *_, **__: primitive is tag_p and Offloadable("device", "pinned_host")
    equal(lambda: plain(away), x)
    with options("jax_remat3"):
        assert "<host>" in str(jax.make_jaxpr(plain(away))(x))


def test_an_error_of_a_codec_names_the_tag():
    stored = jaxmem.remat_policy(Assignment({"block": {"y": Choice("compress", "bit_mask()")}}))
    x = jnp.zeros(16, jnp.complex128)
    with options("jax_remat3"), pytest.raises(TagError, match="tag 'y'"):
        jax.vjp(jax.checkpoint(lambda x: jnp.sin(jaxmem.tag(x * x, "y")), policy=stored), x)


def named(x, p, key):
    return x + jnp.sin(checkpoint_name(jnp.sin(x @ p["a"]), "h"))


CODES = [Choice(action, models.CODEC["in"]) for action in ("compress", "compress_offload")]


@pytest.mark.parametrize("choice", [KEEP, RECOMPUTE, OFFLOAD, *CODES], ids=str)
def test_checkpoint_name_values_are_tags(choice):
    make = lambda: jax.grad(
        models.scanned(jaxmem.remat_policy(Assignment({"block": {"h": choice}})), named)
    )
    assert np.abs(equal(make, *inputs())["a"]).max() > 0


@pytest.mark.parametrize("choice", CODES, ids=str)
def test_codes_of_checkpoint_name_values_are_stored(choice):
    def make():
        stored = jaxmem.remat_policy(Assignment({"block": {"h": choice}}))
        return jax.make_jaxpr(jax.grad(models.scanned(stored, named)))(*inputs())

    off, on = both(make)
    memories = lambda program: sorted(set(re.findall(r"u8(?:<host>)?\[[0-9,]+\]", str(program))))
    assert memories(on) == memories(off) != []


@pytest.fixture
def rule_of_jax(monkeypatch):
    """JAX's rule for values of `checkpoint_name`, as in a process that compresses nothing."""
    from jaxmem._model.tags import hijax

    with options("jax_remat3"):
        names = hijax._names()
    monkeypatch.setattr(names, "remat", getattr(names.remat, "__wrapped__", names.remat))


def test_a_policy_from_before_the_option_takes_no_codes_of_names(rule_of_jax):
    stored = jaxmem.remat_policy(Assignment({"block": {"h": CODES[0]}}))
    with options("jax_remat3"), pytest.raises(TagError, match=r"made before the option jax_remat3"):
        jax.grad(models.scanned(stored, named))(*inputs())


def test_complex_values_of_checkpoint_name_are_stored():
    w = jax.random.normal(jax.random.key(0), (2, 4, 4), jnp.complex128)

    def make(stored):
        block = lambda w: jnp.tanh(checkpoint_name(jnp.exp(w[0] @ w[1]), "powers")) @ w[1]
        block = jax.checkpoint(block, policy=stored)
        return jax.grad(lambda w: (jnp.abs(block(w)) ** 2).sum())

    for action in (OFFLOAD, KEEP, RECOMPUTE):  # once a policy offloads, names may be complex
        stored = jaxmem.remat_policy(Assignment({"block": {"powers": action}}))
        assert np.abs(equal(functools.partial(make, stored), w)).min() > 0


@pytest.mark.parametrize("operation", ["softmax", "tanh", "sigmoid", "exp"])
def test_self_tagged_operations(operation):
    """Both modes, a second derivative, and examples of a batch, at a codec's decoded value too."""
    w, x = (jnp.asarray(np.random.default_rng(n).standard_normal((n, 16))) for n in (16, 4))
    operate = getattr(jaxmem.ops, operation)

    def make(choice):
        block = jax.checkpoint(
            lambda x, w: (operate(x @ w, "y") ** 3).sum(),
            policy=jaxmem.remat_policy(Assignment({"block": {"y": choice}})),
        )
        first = jax.grad(block, argnums=(0, 1))
        mapped = lambda x, w: jax.vmap(jax.grad(block), (0, None))(x[:, None], w)
        if choice.action.encodes:
            return lambda x, w: (first(x, w), mapped(x, w))
        second = jax.grad(lambda x, w: (first(x, w)[0] ** 2).sum(), argnums=(0, 1))
        forward = lambda x, w: jax.jvp(block, (x, w), (x, w))
        return lambda x, w: (first(x, w), mapped(x, w), second(x, w), forward(x, w))

    for choice in (KEEP, RECOMPUTE, Choice("compress", models.CODEC["in"])):
        equal(functools.partial(make, choice), x, w, rtol=1e-10)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["", "jit"])
def test_self_tagged_operations_of_each_example(jit):
    """The softmax over the first axis of an example: the axis of the batch is not that axis."""
    x, w = (jnp.asarray(np.random.default_rng(n).standard_normal((5, n, 4))) for n in (6, 4))

    def make(choice):
        block = jax.checkpoint(
            lambda x, w: (jaxmem.ops.softmax(x @ w, "y", axis=0) ** 3).sum(),
            policy=jaxmem.remat_policy(Assignment({"block": {"y": choice}})),
        )
        return jax.vmap(jit(jax.grad(block, argnums=(0, 1))))

    for choice in (KEEP, RECOMPUTE, Choice("compress", models.CODEC["in"])):
        on = equal(functools.partial(make, choice), x, w, rtol=1e-10)
        assert min(np.abs(leaf).max() for leaf in on) > 0


def test_a_kept_self_tagged_operation_is_not_recomputed():
    with options("jax_remat3"):
        block = jax.checkpoint(
            lambda x, w: (jaxmem.ops.softmax(x @ w, "y") ** 3).sum(),
            policy=jaxmem.remat_policy(Assignment({"block": {"y": KEEP}})),
        )
        grad = jax.jit(jax.grad(block, argnums=(0, 1)))
        text = grad.lower(jnp.ones((4, 16)), jnp.ones((16, 16))).compile().as_text()
    assert text.count(" exponential(") == 1


def test_values_that_a_derivative_rule_saves():
    """`name_residuals` needs the option `jax_custom_vjp3` too."""

    @jax.custom_vjp
    def steep(x):
        return jnp.sin(x)

    steep.defvjp(lambda x: (jnp.sin(x), jnp.exp(x)), lambda e, t: (3 * e * t,))

    def make(choice):
        tagged = jaxmem.ops.name_residuals(steep, "saved")
        stored = jaxmem.remat_policy(Assignment({"block": {"saved": choice}}))
        block = jax.checkpoint(lambda x: tagged(x * x) * x, policy=stored)
        return jax.grad(lambda x: block(x).sum())

    x = jnp.linspace(0.1, 1, 16)
    for choice in (KEEP, RECOMPUTE, OFFLOAD):
        equal(functools.partial(make, choice), x, also=("jax_custom_vjp3",))
    with options("jax_remat3", "jax_custom_vjp3"):
        text = jax.jit(make(KEEP)).lower(x).compile().as_text()
    assert text.count(" exponential(") == 1, "saved, and not recomputed"
    with options("jax_remat3"), pytest.raises(TagError, match="jax_custom_vjp3 is off"):
        jax.grad(lambda x: make(KEEP)(x).sum())(x)


def test_groups_of_layers():
    choices = {"block[0:1]": models.actions("compress"), "block[1:2]": models.actions("offload")}
    grouped = Assignment(choices)

    def make():
        layers = [
            jax.checkpoint(models.block, policy=jaxmem.remat_policy(grouped, layer=(i, 2)))
            for i in range(2)
        ]

        def loss(p, x):
            for i, layer in enumerate(layers):
                x = layer(x, jax.tree.map(lambda a, i=i: a[i], p), jnp.float32(i))
            return (x * x).mean()

        return jax.grad(loss)

    equal(make, *inputs())


@each_action
def test_gradients_of_a_stack_are_equal(action):
    block = lambda p, x: models.block(x, p, jnp.float32(2))

    def make():
        loss = lambda p, x: (jaxmem.stack(block, p, x, plan=models.draft(action)) ** 2).mean()
        return jax.grad(loss, argnums=(0, 1))

    on = equal(make, *inputs())
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(on))


@pytest.mark.parametrize("form", [models.scanned, models.unrolled])
@each_action
def test_gradients_of_auto_are_equal(form, action):
    loss = form(None)
    step = lambda p, x: jax.value_and_grad(loss)(p, x)
    (found,) = found_layers(step, inputs())
    codec = models.CODEC["up"] if "compress" in action else None
    is_exact = lambda tag: tag.kind in ("mask", "exact")
    choose = lambda tag: KEEP if is_exact(tag) else Choice(action, codec)
    plan = Assignment({"auto": {tag.name: choose(tag) for tag in found.candidates}})
    on = equal(lambda: jaxmem.auto(step, plan), *inputs())
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(on[1]))


def test_a_policy_made_before_the_option_is_on_is_refused():
    keep = jaxmem.remat_policy(None)
    with options("jax_remat3"), pytest.raises(TagError, match="keep every tensor by a policy"):
        jax.grad(models.scanned(keep))(*inputs())


def test_a_trace_has_the_recomputed_block_once():
    with options("jax_remat3"):
        nothing = jaxmem.remat_policy(Assignment.nothing())
        grad = jax.grad(models.unrolled(nothing, models.narrow))
        is_block = lambda eqn: isinstance(hijax_params(eqn).get("policy"), Policy)
        traced = jax.make_jaxpr(grad)(*inputs()).jaxpr
        blocks = [eqn for eqn in equations(traced) if is_block(eqn)]
    products = [sum(e.primitive.name == "dot_general" for e in inside(eqn)) for eqn in blocks]
    assert products == [1, 1], "of each layer x @ up, and not the product that no tensor reads"
