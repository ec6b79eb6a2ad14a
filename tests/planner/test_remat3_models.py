"""Models that know nothing of jaxmem, under JAX's next checkpoint, the option `jax_remat3`: each
plan of `jaxmem.auto` is made with the option off and with the option on.
"""

import dataclasses
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
from tests.shared.remat3 import both, compiled, needed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    pytest.mark.todays_checkpoint,
    pytest.mark.filterwarnings("ignore:jaxmem. offload is left out"),
    needed,
]
ALL = steps.MODELS | {
    "MaxText's decoder": maxtext.decoder,
    "under a cond": plain.under_cond,
    "under a vmap": plain.under_vmap,
}


# The actions of a search, and the share of the bytes between its ends that its budget allows.
KINDS = {
    "lossless": ("lossless", 0.5),
    "all actions": ("all", 0.5),
    "all actions, few bytes": ("all", 0.1),
}
SIZE = Size(width=64, heads=8, layers=3, batch=2, sequence=16, vocab=48, dtype=jnp.float64)
# XLA cannot split every operation on 64 bits for a TPU, so that JAX has its 32 bits there.
SIZES = {"v5e": dataclasses.replace(SIZE, dtype=jnp.float32)}


@functools.cache
def step_of(name, target):
    """A model's step, which adds the gradient to the parameters, and its arguments."""
    loss, params, rest = ALL[name](SIZES.get(target, SIZE))
    return steps.step_of(loss), (params, *rest)


def shapes(args):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


@functools.cache
def assignment_of(name, target, kind):
    """An assignment by its kind: fixed, or the actions and the budget of a search. The budget is a
    share of the way from the bytes of full recomputation to the bytes of everything kept. A search
    for a v5e compiles for minutes: it takes the plan for an h200."""
    if kind == "nothing":
        return Assignment.nothing()
    if kind == "everything":
        return Assignment.everything()
    actions, share = KINDS[kind]
    step, args = step_of(name, target)
    target = "h200" if target == "v5e" else target
    given = (jaxmem.auto(step), *shapes(args))
    least, most = (
        jaxmem.plans.price(given[0], end(), *given[1:], target=target).compiled_bytes
        for end in (Assignment.nothing, Assignment.everything)
    )
    budget = int(least + share * (most - least))
    return Assignment(jaxmem.plan(*given, budget=budget, actions=actions, target=target).actions)


def program(name, target, assignment):
    """Bytes of a model's step; on the device at hand also its results."""
    step, args = step_of(name, target)
    build = lambda plan: jaxmem.auto(step, plan)
    if target != "local":
        return (*compiled(build, shapes(args), assignment, target)[:2], None)
    nbytes, host, executable = compiled(build, args, assignment)
    return nbytes, host, executable(*jax.tree.map(jnp.copy, args))


def assert_equal(off, on, rtol=1e-12):
    close(on, off, rtol)
    floats = [a for a in jax.tree.leaves(off) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert any(np.abs(a).max() > 0 for a in floats)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["nothing", "everything", *KINDS])
@pytest.mark.parametrize(
    "target", ["local", "h200", pytest.param("v5e", marks=pytest.mark.jax_defaults)]
)
def test_bytes_and_gradients_are_equal(name, kind, target):
    assignment = assignment_of(name, target, kind)
    off, on = both(lambda: program(name, target, assignment))
    if target == "local":
        assert_equal(off[2], on[2])
    # JAX's own policy keeps everything, and may keep other tensors than jaxmem's.
    if kind != "everything":
        assert on[:2] == (pytest.approx(off[0], rel=0.01), pytest.approx(off[1], rel=0.01))
