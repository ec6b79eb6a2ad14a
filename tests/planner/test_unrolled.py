"""Layers that a Python loop repeats: profiled once, decided in two groups, and warned of where they
save little.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.versions import installed, release
from jaxmem._cost.blocks.classes import classes_of
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.profile.profile import block_classes
from jaxmem._target.devices.support import UNROLLED_SINCE, unrolled_obstacle
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import BudgetError, JaxmemWarning, TagError
from jaxmem.plans import Assignment
from tests.auto.test_auto import farthest
from tests.shared.foreign import plain as models
from tests.shared.foreign.size import SMALL, normal
from tests.shared.marks import slow

pytestmark = pytest.mark.standard_promotion

WIDTH = 32


def layer(x, w, key, i):
    keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
    return x + jnp.where(keep, jnp.tanh(x @ w["up"]) @ w["down"], 0.0) * (i + 1.0)


def given(layers: int):
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    w = {"up": shape(layers, WIDTH, 4 * WIDTH), "down": shape(layers, 4 * WIDTH, WIDTH)}
    return w, shape(256, WIDTH), jax.eval_shape(lambda: jax.random.key(0))


def step(w, x, key):
    def loss(w):
        h = x
        for i in range(len(w["up"])):
            h = layer(h, jax.tree.map(lambda a, i=i: a[i], w), key, i)
        return (h**2).mean()

    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))


def classes(layers: int):
    _, traced = trace(jaxmem.auto(step), Assignment.nothing(), given(layers))
    return classes_of(find_blocks(traced.jaxpr.jaxpr))


def test_equal_layers_are_one_class_whatever_slices_and_keys_they_read():
    """The first one, whose input has no gradient, is another; more layers are no more classes."""
    assert sorted(len(c.instances) for c in classes(3)) == [1, 2]
    assert sorted(len(c.instances) for c in classes(12)) == [1, 11]


@pytest.mark.parametrize("model", [slow(models.gemma_in_a_scan), models.gemma_in_a_loop])
def test_two_groups_of_layers_compute_the_same(model):
    loss, params, args = model()
    first, last = "auto[0:1]", f"auto[1:{SMALL.layers}]"
    groups = Assignment({first: {"softmax": "keep"}, last: {"*": "keep"}})
    want = jax.jit(jax.grad(loss))(params, *args)
    planned = jax.grad(jaxmem.auto(loss, groups))
    assert farthest(jax.jit(planned)(params, *args), want) < 1e-12
    program = str(jax.make_jaxpr(planned)(params, *args))
    one = str(jax.make_jaxpr(jax.grad(jaxmem.auto(loss, Assignment.nothing())))(params, *args))
    assert program != one


def test_a_reversed_scan_is_divided_in_the_order_in_which_it_runs():
    w = jnp.asarray(normal(0, 4, WIDTH, WIDTH))
    x = jnp.asarray(normal(1, 8, WIDTH))

    def loss(w, x):
        turn = lambda h, one: (jnp.tanh(h @ one) + h, h.sum())
        last, sums = jax.lax.scan(turn, x, w, reverse=True)
        return (last**2).mean() + (sums * jnp.arange(4.0)).sum()

    groups = Assignment({"auto[0:1]": {}, "auto[1:4]": {"in": "keep"}})
    want = jax.grad(loss)(w, x)
    assert farthest(jax.grad(jaxmem.auto(loss, groups))(w, x), want) < 1e-12


def test_little_can_be_saved_on_a_cpu_and_that_is_said_before_a_compile(monkeypatch):
    compiles = []
    monkeypatch.setattr("jaxmem._planner.plan.find_plan", lambda *_: compiles.append(1) or 1 / 0)
    arguments = given(6)
    if release(installed("jaxlib") or "0") >= UNROLLED_SINCE:
        assert unrolled_obstacle(Target.parse("local")) is None
        obstacle = lambda target: "jaxlib 0 undoes them"
        monkeypatch.setattr("jaxmem._planner.plan.unrolled_obstacle", obstacle)
    told = pytest.warns(JaxmemWarning, match="follow each other without a loop, and jaxlib")
    with told, pytest.raises(ZeroDivisionError):
        jaxmem.plan(jaxmem.auto(step), *arguments, budget="1.2MB")
    assert compiles == [1]
    assert unrolled_obstacle(Target.parse("h200")) is None


def test_a_budget_that_fits_everything_is_not_warned_of(recwarn):
    plan = jaxmem.plan(jaxmem.auto(step), *given(2), budget="1GiB")
    assert plan.keeps_everything
    assert not [w for w in recwarn if "without a loop" in str(w.message)]
    with pytest.raises(BudgetError):
        jaxmem.plan(jaxmem.auto(step), *given(2), budget="10kB")


def test_layers_tagged_by_hand_are_divided_where_the_loop_says_which_they_are():
    """The second group's policy is another, and together they are what one policy computes."""

    def build(plan, say=True):
        def loss(w, x):
            x = jnp.sin(x * w["up"].mean())  # as of an embedding
            for i in range(3):
                own = {"layer": (i, 3)} if say else {}
                block = jax.checkpoint(tagged, policy=jaxmem.remat_policy(plan, **own))
                x = block(x, jax.tree.map(lambda a, i=i: a[i], w))
            return (x**2).mean()

        return jax.grad(loss)

    def tagged(x, w):
        return x + jaxmem.tag(jnp.tanh(x @ w["up"]), "up") @ w["down"]

    normals = lambda i, *shape: jnp.asarray(normal(i, 3, *shape))
    w = {"up": normals(0, WIDTH, 2 * WIDTH), "down": normals(1, 2 * WIDTH, WIDTH)}
    x = normal(2, 8, WIDTH)
    groups = Assignment({"block[0:2]": {}, "block[2:3]": {"up": "keep"}})
    assert farthest(build(groups)(w, x), build(None)(w, x)) < 1e-12
    with pytest.raises(TagError, match="say which layer it is"):
        build(groups, say=False)(w, x)
    _, traced = trace(build, Assignment.nothing(), (w, x))
    assert [b.divisible for b in block_classes(traced.jaxpr)] == [3]
