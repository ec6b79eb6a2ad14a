"""Plans under JAX's next checkpoint, the option `jax_remat3`: each step is planned or compiled with
the option off and with the option on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, Choice
from jaxmem._core.assignment import Assignment
from tests.shared import models
from tests.shared.compare import close
from tests.shared.remat3 import both, compiled, needed

pytestmark = [pytest.mark.core, pytest.mark.todays_checkpoint, needed]
WIDTH = 16
CODES = Choice("compress", "grouped_symmetric(group=16,scale=bfloat16)")


def named(x, p, key):
    """A block whose tensors `checkpoint_name` names."""
    up = checkpoint_name(x @ p["up"], "up")
    return x + checkpoint_name(jnp.sin(up) * up, "act") @ p["down"]


@jax.custom_vjp
def steep(x):
    return jnp.sin(x)


steep.defvjp(lambda x: (jnp.sin(x), jnp.exp(x)), lambda e, t: (3 * e * t,))


def looping(x, p, key):
    """A block with a scan, a while loop, and a function with a derivative rule of its own."""
    up = jaxmem.tag(x @ p["up"], "up")
    turned, _ = jax.lax.scan(lambda h, _: (jnp.sin(h) + h / 2, None), up, None, length=3)
    size = jax.lax.stop_gradient(jnp.abs(turned).mean())
    scale = jax.lax.while_loop(lambda s: s < 2, lambda s: 2 * s, size)
    return x + steep(jaxmem.tag(turned / scale, "act")) @ p["down"]


def of_blocks(form, block):
    def build(plan):
        return jax.grad(form(jaxmem.remat_policy(plan), block))

    p = models.parameters(width=WIDTH, dtype=jnp.float64)
    return build, {k: p[k] for k in ("up", "down")}, models.batch(8, 32, WIDTH, jnp.float64)


def of_linen():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = lambda n: nn.Dense(n, param_dtype=jnp.float64)
            up = jaxmem.tag(dense(2 * WIDTH)(x), "up")
            return x + dense(WIDTH)(jaxmem.tag(jnp.sin(up) * up, "act"))

    class Net(nn.Module):
        layer: type

        @nn.compact
        def __call__(self, x):
            body = lambda layer, x, _: (layer(x), None)
            over = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return over(self.layer(name="layer"), x, None)[0]

    def build(plan):
        layer = nn.remat(Layer, policy=jaxmem.remat_policy(plan), prevent_cse=False)
        return jax.grad(lambda p, x: (Net(layer).apply(p, x) ** 2).mean())

    x = models.batch(8, 32, WIDTH, jnp.float64)
    shapes = jax.eval_shape(Net(Layer).init, jax.random.key(0), x)
    rng = np.random.default_rng(3)
    return build, jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 4), shapes), x


STEPS = {
    "scanned": lambda: of_blocks(models.scanned, models.narrow),
    "unrolled": lambda: of_blocks(models.unrolled, models.narrow),
    "names": lambda: of_blocks(models.scanned, named),
    "loops": lambda: of_blocks(models.scanned, looping),
    "linen": of_linen,
}
each_step = pytest.mark.parametrize("step", STEPS)


def assert_equal_steps(off, on, args):
    """Asserts that two steps return equal gradients, and that no gradient is zero. Each step
    donates the first argument, so each step gets a copy.
    """
    off, on = (step(*jax.tree.map(jnp.copy, args)) for step in (off, on))
    close(on, off, 1e-12)
    assert all(np.abs(leaf).min(axis=-1).max() > 0 for leaf in jax.tree.leaves(off))


def equal_plans(build, args, budget):
    """Asserts that the plans within a budget are equal. Returns their actions."""
    off, on = both(lambda: jaxmem.plan(build, *args, budget=budget, actions="lossless"))
    assert on.actions == off.actions
    assert on.compiled_bytes == pytest.approx(off.compiled_bytes, rel=0.01)
    assert on.compiled_bytes <= budget
    assert_equal_steps(off.step, on.step, args)
    return on.actions


@each_step
def test_plans_are_equal(step):
    build, p, x = STEPS[step]()
    least, most = (compiled(build, (p, x), plan)[0] for plan in (Assignment.nothing(), kept()))
    budget = (least + 3 * most) // 4
    assert least < budget < most
    actions = equal_plans(build, (p, x), budget)
    assert {c.action for c in actions["block"].values()} == {KEEP.action, RECOMPUTE.action}


@pytest.mark.quick("scanned")
@pytest.mark.parametrize("form", [models.scanned, models.unrolled])
def test_plans_of_auto_are_equal(form):
    p, x = (
        models.parameters(width=WIDTH, dtype=jnp.float64),
        models.batch(8, 32, WIDTH, jnp.float64),
    )
    step = lambda p, x: jax.grad(form(None))(p, x)
    as_written = compiled(lambda plan: step, (p, x), None)[0]
    actions = equal_plans(jaxmem.auto(step), (p, x), as_written * 3 // 4)
    assert RECOMPUTE.action in {c.action for c in actions["auto"].values()}


def kept():
    return Assignment({"block": {"up": KEEP, "act": KEEP, "mask": KEEP}})


FIXED = {
    "keep": kept(),
    "recompute": Assignment.nothing(),
    "offload": Assignment({"block": {"up": OFFLOAD, "act": OFFLOAD}}),
    "compress": Assignment({"block": {"up": CODES, "act": CODES}}),
}


@each_step
@pytest.mark.parametrize("plan", FIXED)
def test_bytes_and_gradients_are_equal(step, plan):
    build, p, x = STEPS[step]()
    off, on = both(lambda: compiled(build, (p, x), FIXED[plan]))
    assert on[0] == pytest.approx(off[0], rel=0.01)
    assert on[1] == off[1]
    assert_equal_steps(off[2], on[2], (p, x))


@pytest.mark.slow
@each_step
@pytest.mark.parametrize("target", ["h200", "v5e"])
@pytest.mark.parametrize("plan", FIXED)
def test_bytes_without_the_device_are_equal(step, target, plan):
    build, p, x = STEPS[step]()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), (p, x))
    off, on = both(lambda: compiled(build, shapes, FIXED[plan], target))
    assert on[0] == pytest.approx(off[0], rel=0.01)
    assert on[1] == off[1]


@each_step
def test_gradients_with_everything_kept_are_equal(step):
    """JAX's own policy keeps the tensors, and may keep others than jaxmem's."""
    build, p, x = STEPS[step]()
    off, on = both(lambda: compiled(build, (p, x), Assignment.everything())[2])
    assert_equal_steps(off, on, (p, x))
