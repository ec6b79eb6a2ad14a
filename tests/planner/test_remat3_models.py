"""Models that know nothing of jaxmem, under JAX's next checkpoint, the option `jax_remat3`: each
plan of `jaxmem.auto` is made with the option off and with the option on.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from benchmarks.shared import steps
from jaxmem.plans import Assignment
from tests.shared.compare import close
from tests.shared.foreign import maxtext, plain
from tests.shared.foreign.size import Size
from tests.shared.remat3 import both

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    pytest.mark.todays_checkpoint,
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the option is refused before 0.12"),
]
ALL = steps.MODELS | {
    "MaxText's decoder": maxtext.decoder,
    "under a cond": plain.under_cond,
    "under a vmap": plain.under_vmap,
}


SIZE = Size(width=64, heads=8, layers=3, batch=2, sequence=16, vocab=48, dtype=jnp.float64)


@functools.cache
def step_of(name):
    """A model's step, which adds the gradient to the parameters, and its arguments in float64."""
    loss, params, rest = ALL[name](SIZE)
    return steps.step_of(loss), (params, *rest)


def planned(name, budget, actions, target="local"):
    step, args = step_of(name)
    given = args
    if target != "local":
        given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    return jaxmem.plan(jaxmem.auto(step), *given, budget=budget, actions=actions, target=target)


def compiled(name, assignment):
    step, args = step_of(name)
    found = jax.jit(jaxmem.auto(step, assignment)).lower(*args).compile()
    size = found.memory_analysis()
    return size.temp_size_in_bytes + size.output_size_in_bytes, found(*args)


def assert_equal(off, on, rtol=1e-12):
    close(on, off, rtol)
    floats = [a for a in jax.tree.leaves(off) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert any(np.abs(a).max() > 0 for a in floats)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("assignment", ["nothing", "everything"])
def test_fixed_plans(name, assignment):
    off, on = both(lambda: compiled(name, getattr(Assignment, assignment)()))
    assert_equal(off[1], on[1])
    if assignment == "nothing":
        assert on[0] == pytest.approx(off[0], rel=0.01)


@pytest.mark.parametrize("name", ALL)
def test_searched_plans(name):
    step, args = step_of(name)
    price = lambda assignment: jaxmem.plans.price(jaxmem.auto(step), assignment, *args)
    least, most = (price(a()).compiled_bytes for a in (Assignment.nothing, Assignment.everything))
    off, on = both(lambda: planned(name, (least + most) // 2, "lossless"))
    assert on.actions == off.actions
    assert on.compiled_bytes == pytest.approx(off.compiled_bytes, rel=0.01)
    copied = lambda: jax.tree.map(jnp.copy, args)
    assert_equal(off.step(*copied()), on.step(*copied()))


@pytest.mark.parametrize("name", ALL)
def test_plans_for_an_absent_gpu(name):
    whole = planned(name, "1GiB", "lossless", "h200").baseline_bytes
    off, on = both(lambda: planned(name, int(0.8 * whole), "all", "h200"))
    assert on.actions == off.actions
    assert on.compiled_bytes == pytest.approx(off.compiled_bytes, rel=0.01)
