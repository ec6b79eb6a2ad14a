"""The largest size that fits: no larger size has a plan by itself, few sizes are planned, and plans
decide, whatever bytes the assignment of another size has.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._planner.sizes import Boundary
from jaxmem._result.plan.rows import Point
from jaxmem.errors import BudgetError, StepError
from tests.shared import models, plans

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_database")]
LAYERS, WIDTH, SEQUENCE, STEP = 4, 32, 16, 2
SIZES = range(STEP, 401, STEP)
W = jax.eval_shape(functools.partial(models.parameters, LAYERS, WIDTH))
BLOCKS = {"attention": models.block, "narrow": models.narrow}
SEARCHED, ROOM = range(8, 8001, 8), 10_000


def examples(size):
    return jax.ShapeDtypeStruct((size, SEQUENCE, WIDTH), jnp.float32)


def plan_of(block, actions, budget, x, **given):
    build = models.build_of(BLOCKS[block])
    return jaxmem.plan(build, W, x, budget=budget, actions=actions, fresh=True, **given)


@pytest.mark.parametrize(
    ("block", "actions", "budget"),
    [
        pytest.param("narrow", "lossless", "400KiB", id="narrow"),
        pytest.param("attention", "keep,recompute", "1MiB", marks=pytest.mark.slow, id="small"),
        pytest.param("attention", "keep,recompute", "2MiB", marks=pytest.mark.slow, id="large"),
        pytest.param("attention", "all", "1MiB", marks=pytest.mark.slow, id="codecs"),
        pytest.param("attention", None, "700KiB", marks=pytest.mark.slow, id="default"),
    ],
)
def test_no_larger_size_has_a_plan_by_itself(block, actions, budget, caplog):
    caplog.set_level(logging.INFO, logger="jaxmem")
    plan = plan_of(block, actions, budget, examples, batch="max", sizes=SIZES)
    planned = [r.args[0] for r in caplog.records if "planning for size" in r.msg]
    assert SIZES[0] < plan.batch < SIZES[-3], "the test is of a boundary between candidates"
    assert plan.compiled_bytes <= plan.budget_bytes
    assert {plan.batch, plan.batch + STEP} <= {*planned}
    assert len(planned) == len({*planned}) <= 4, "sizes near the boundary, each once"
    for size in range(plan.batch + STEP, plan.batch + 4 * STEP, STEP):
        with pytest.raises(BudgetError, match="least that compiled"):
            plan_of(block, actions, budget, examples(size))


@dataclasses.dataclass(frozen=True)
class Probe:
    """Stands for `StepSizes` with an assignment of `bytes_of` a size. Estimates are `off`, and
    `width` sizes compile at once. The assignment of a plan fits no other size.
    """

    bytes_of: Callable[[int], float]
    off: float = 1.0
    width: int = 1
    made: list = dataclasses.field(default_factory=list)
    is_of_plan: bool = False

    def under(self, actions):
        return dataclasses.replace(self, is_of_plan=True)

    def least(self, size):
        return int(self.off * self.bytes_of(size))

    def compiled(self, *sizes):
        self.made.append(sizes[: self.width])
        size_of = lambda n: ROOM + 1 if self.is_of_plan else int(self.bytes_of(n))
        return [size_of(n) for n in sizes[: self.width]]


def searched(true, probe):
    """The size that is found, and the sizes that are planned. Plans need `true` bytes."""
    made = []

    def plan_at(size):
        made.append(size)
        if true(size) > ROOM:
            raise BudgetError("too large", least_bytes=int(true(size)))
        return dataclasses.replace(plans.plan(), points=(Point(int(true(size)), 1.0),))

    boundary = Boundary(SEARCHED, true, ROOM, plan_at, lambda size: probe)
    return SEARCHED[boundary.find()], made


TRUE = [lambda n: 2000 + 3 * n, lambda n: max(2000 + 3 * n, 5 * n - 2000), lambda n: 9000 + n]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("off", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("true", TRUE)
def test_two_sizes_are_planned_if_an_assignment_is_the_least(true, off, width):
    probe = Probe(true, off, width)
    found, made = searched(true, probe)
    assert true(found) <= ROOM < true(found + 8)
    assert made == [found, found + 8]
    each = [size for many in probe.made for size in many]
    assert len(each) == len({*each})
    assert len(probe.made) <= 6


@pytest.mark.parametrize("more", [-500, 40, 400, 4000])
@pytest.mark.parametrize("true", TRUE)
def test_plans_decide_where_an_assignment_takes_other_bytes(true, more):
    """An assignment that takes fewer bytes than any plan stands for a plan that needs more time."""
    found, made = searched(true, Probe(lambda n: true(n) + more))
    assert true(found) <= ROOM < true(found + 8)
    assert len(made) == len({*made}) <= 12


def test_an_assignment_that_xla_does_not_compile_and_none_leave_the_search_to_plans():
    class Refused(Probe):
        def compiled(self, *sizes):
            raise StepError("XLA fails")

    true = TRUE[0]
    assert searched(true, Refused(true))[0] == 2664
    none = Boundary(SEARCHED, true, ROOM, lambda n: plans.plan(), lambda size: None)
    assert none.find() == len(SEARCHED) - 1
