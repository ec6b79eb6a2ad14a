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
from tests.shared.remat3 import both, compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    pytest.mark.todays_checkpoint,
    pytest.mark.filterwarnings("ignore:jaxmem. offload is left out"),
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


def shapes(args):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


@functools.cache
def searched(name, target, actions):
    """The assignment of a plan for a budget between the least and the most bytes."""
    step, args = step_of(name)
    given = (jaxmem.auto(step), *shapes(args))
    ends = Assignment.nothing(), Assignment.everything()
    price = lambda end: jaxmem.plans.price(given[0], end, *given[1:], target=target)
    budget = sum(price(end).compiled_bytes for end in ends) // 2
    return Assignment(jaxmem.plan(*given, budget=budget, actions=actions, target=target).actions)


def results(name, assignment):
    """Compiled bytes and results of a model's step on the device at hand."""
    step, args = step_of(name)
    nbytes, _, executable = compiled(lambda plan: jaxmem.auto(step, plan), args, assignment)
    return nbytes, executable(*jax.tree.map(jnp.copy, args))


def assert_equal(off, on, rtol=1e-12):
    close(on, off, rtol)
    floats = [a for a in jax.tree.leaves(off) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert any(np.abs(a).max() > 0 for a in floats)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("plan", ["nothing", "everything", "searched"])
def test_bytes_and_gradients_are_equal(name, plan):
    if plan == "searched":
        assignment = searched(name, "local", "lossless")
    else:
        assignment = getattr(Assignment, plan)()
    off, on = both(lambda: results(name, assignment))
    assert_equal(off[1], on[1])
    # JAX's own policy keeps everything, and may keep other tensors than jaxmem's.
    if plan != "everything":
        assert on[0] == pytest.approx(off[0], rel=0.01)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("actions", ["lossless", "all"])
def test_bytes_of_plans_for_an_absent_gpu_are_equal(name, actions):
    step, args = step_of(name)
    plan = searched(name, "h200", actions)
    off, on = both(
        lambda: compiled(lambda plan: jaxmem.auto(step, plan), shapes(args), plan, "h200")
    )
    assert on[0] == pytest.approx(off[0], rel=0.01)
    assert on[1] == off[1]
