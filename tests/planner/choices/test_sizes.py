"""A plan that chooses the size of a minibatch: the largest that fits, or the fastest, with few
plans and against every candidate. A plan that chooses how many microbatches a step takes: the
fastest that fits, with its number in the file.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import ALL, KEEP, UNTAGGED
from jaxmem._cost.profile.options import Allowed
from jaxmem._planner.microbatches import fastest_plan
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.sizes import Boundary, StepSizes, of_size, possible, within
from jaxmem._result.plan.rows import Point
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import is_function, sized
from jaxmem.errors import BudgetError, PlanFileError, StepError
from tests.planner.choices.test_frontier import W, build, released, rows, shape
from tests.shared import plans, tiny_lm
from tests.shared.refused import refused

ROOM = 10_000
SIZES = (256, 512, 1024)
BUDGET = "1500KiB"
LIMITS = Limits(2**30, 2**30, 2**30)
# Sizes are chosen alike whatever a plan may do; without codecs it takes less than half as long.
LOSSLESS = {"actions": ["recompute"]}


def tokens(size):
    return jax.ShapeDtypeStruct((size, 65), jnp.int32)


@functools.cache
def state():
    params = functools.partial(tiny_lm.parameters, jnp.float32, width=64, vocab=64)
    return jax.eval_shape(released(None).init, jax.eval_shape(params))


@functools.cache
def each():
    """What plans for every candidate are, by themselves; None for those that do not fit."""
    found = {}
    for size in SIZES:
        try:
            found[size] = jaxmem.plan(build, W, rows(size), budget=BUDGET, **LOSSLESS)
        except BudgetError:
            found[size] = None
    return found


def chosen(given=rows, **arguments):
    arguments = {"budget": BUDGET, "sizes": SIZES} | LOSSLESS | arguments
    return jaxmem.plan(build, W, given, **arguments)


def test_the_largest_size_that_fits_is_that_before_the_first_that_does_not():
    fitting = [size for size, plan in each().items() if plan is not None]
    assert fitting == [256, 512], "the test is of a boundary between candidates"
    plan = chosen(batch="max")
    assert plan.batch == 512
    assert plan.compiled_bytes <= plan.budget_bytes
    assert "; batch: 512" in str(plan)
    assert any("the next size, 1024, needs" in note for note in plan.notes)
    assert jnp.isfinite(loss_of(plan, plan.batch))


def loss_of(plan, size):
    """The loss of one planned step."""
    w = jax.tree.map(lambda a: jnp.full(a.shape, 0.1), W)
    return plan.step(w, jnp.ones((size, 32)))[1]


def test_the_fastest_size_is_that_of_the_highest_throughput():
    plan = chosen(batch="fastest")
    pace = lambda size, plan: size / plan.predicted_seconds
    others = {size: pace(size, p) for size, p in each().items() if p is not None}
    # Times that are measured anew for a size are another run's.
    assert pace(plan.batch, plan) >= 0.8 * max(others.values())


@pytest.mark.parametrize(
    ("microbatches", "numbers", "least"), [(4, None, 4), (1, (2, 3), 6), (1, None, 1)]
)
def test_multiples_of_what_the_step_can_be_traced_for_may_be_taken(microbatches, numbers, least):
    most = microbatches if numbers is None else max(numbers)
    with backend_for(Target.parse("local")) as backend:
        made = functools.partial(build, microbatches=most)
        estimated = StepSizes(made, (W, rows), backend, LIMITS, ["actions"], Allowed(ALL))
        found = possible(estimated, None, numbers)
        assert found[:3] == range(least, 4 * least, least)
        assert list(possible(estimated, (8, 4, 8), numbers)) == [4, 8]


def test_a_divided_step_is_walked_through_as_the_part_of_one_device():
    def divided(plan):
        tx = jaxmem.adama(1e-3, accumulation_steps=2, axis_name="data")
        return tiny_lm.released(tx, plan=plan)

    with backend_for(Target.parse("h200:2")) as backend:
        given = (state(), tokens), backend, LIMITS
        of = lambda build, decide: StepSizes(build, *given, decide, Allowed(ALL))
        two = of(divided, ["actions", "states", "sharding"])
        one = of(released, ["actions", "states"])
        assert 2 * (two.least(16) - two.least(8)) == one.least(16) - one.least(8)
        assert two.kept(16) > two.least(16)
        assert possible(two, None, None)[:2] == range(4, 12, 4), "two microbatches on each of two"


@pytest.mark.slow
def test_without_sizes_the_last_multiple_that_fits_is_found():
    four = functools.partial(build, microbatches=4)
    plan = jaxmem.plan(four, W, rows, budget="2MiB", batch="max")
    assert plan.batch % 4 == 0
    assert any(f"the next size, {plan.batch + 4}, needs" in note for note in plan.notes)


@pytest.mark.slow
def test_a_size_takes_its_best_number_of_microbatches():
    plan = chosen(batch="max", microbatches=(1, 3), sizes=(192, 6000))
    assert plan.batch == 192
    assert plan.microbatches in (1, 3)


def test_what_no_power_of_two_can_be_traced_for_asks_for_sizes():
    three = functools.partial(build, microbatches=3)
    with pytest.raises(StepError, match=r"any of the sizes 1, 2, 4, .*1024; expected `sizes`"):
        jaxmem.plan(three, W, rows, batch="max")


@pytest.mark.slow
def test_states_are_placed_for_the_size_that_is_found():
    both = ("actions", "states")
    options = {"budget": "8MiB", "sizes": (48, 192), "decide": both} | LOSSLESS
    plan = jaxmem.plan(released, state(), tokens, batch="max", **options)
    assert plan.batch == 48
    assert plan.places is not None


@pytest.mark.slow
def test_a_context_length_is_chosen_alike():
    lengths = lambda n: shape(4, n, 32)
    plan = chosen(batch="max", sizes=(32, 64, 128, 256), given=lengths)
    assert 32 < plan.batch < 256
    with pytest.raises(BudgetError):
        jaxmem.plan(build, W, lengths(2 * plan.batch), budget=BUDGET, **LOSSLESS)


@refused(
    StepError,
    ({"batch": "largest"}, "`batch` is 'largest'; expected 'max'"),
    ({"sizes": (8, 16)}, "`batch` is None; expected 'max'"),
    ({"batch": "max", "sizes": ()}, r"`sizes` is \(\); expected whole numbers"),
    ({"batch": "max", "sizes": (0, 8)}, "`sizes` is .*; expected whole numbers"),
    ({"batch": "max", "sizes": (8.0,)}, "`sizes` is .*; expected whole numbers"),
    ({"batch": "max", "sizes": 8}, "`sizes` is 8; expected whole numbers"),
    ({"batch": "max", "sizes": range(1, 10**30)}, "at most 1048576 of them"),
)
def test_what_cannot_be_meant_is_refused(arguments):
    jaxmem.plan(build, W, rows, **arguments)


def test_arguments_without_a_function_and_functions_that_fail_are_named():
    with pytest.raises(StepError, match="none of the step's arguments is a function of a size"):
        jaxmem.plan(build, W, rows(8), batch="max")
    with pytest.raises(StepError, match="argument 1 of the step .* failed for 8: TypeError"):
        jaxmem.plan(build, W, lambda n: jnp.zeros(n, 3), batch="max", sizes=(8,))


class Module:
    def __call__(self, size):
        raise AssertionError("modules are arguments, and not functions of a size")


def test_functions_are_called_with_the_size_and_make_no_arrays():
    kept = jax.tree_util.Partial(jnp.add, 1.0)
    made = {"x": jnp.zeros((3,)), "n": 7}
    huge = lambda n: {"x": jnp.zeros((n, 2**40)), "shape": rows(n), "n": n}
    args = sized((made, kept, Module(), huge), 2**20)
    assert args[0] is made
    assert args[1] is kept
    assert isinstance(args[2], Module)
    assert args[3]["x"].shape == (2**20, 2**40)
    assert args[3]["shape"] == rows(2**20)
    assert args[3]["n"] == 2**20
    assert not any(map(is_function, args))
    assert sized((functools.partial(shape, 3),), 5) == (shape(3, 5),)


@pytest.mark.parametrize("grows", [lambda i: 7 * i, lambda i: i * i, lambda i: 90 * i**0.5])
@pytest.mark.parametrize("count", [1, 2, 3, 17, 5000])
def test_the_last_within_a_room_is_that_of_all(grows, count):
    for room in (-1, 0, 1, 50, 5000, 10**9):
        expected = sum(grows(i) <= room for i in range(count)) - 1
        asked = []
        assert within(count, lambda i, asked=asked: asked.append(i) or grows(i), room) == expected
        assert len(asked) == len(set(asked)) <= 24


SEARCHED = range(8, 8001, 8)


def searched(true, estimated, told=True, seconds=lambda n: 1.0):
    """A boundary whose plans need `true` bytes, where estimates say `estimated`."""
    made = []

    def plan_at(size):
        made.append(size)
        if true(size) > ROOM:
            raise BudgetError("too large", least_bytes=int(true(size)))
        points = (Point(int(true(size)), 1.0),) if told else ()
        return dataclasses.replace(plans.plan(), points=points, predicted_seconds=seconds(size))

    return Boundary(SEARCHED, estimated, ROOM, plan_at), made


TRUE = [lambda n: 2000 + 3 * n, lambda n: 2000 + n * n // 500, lambda n: n, lambda n: 9000 + n]


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("off", [0.5, 0.9, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("true", TRUE)
def test_the_boundary_is_found_whatever_walks_are_off(true, off, told):
    boundary, made = searched(true, lambda n: int(off * true(n)), told)
    found = boundary.find()
    assert true(SEARCHED[found]) <= ROOM
    assert found + 1 == len(SEARCHED) or true(SEARCHED[found + 1]) > ROOM
    assert len(made) <= (8 if told else 16)
    assert len(made) <= len(set(made)) + 1, "the last one that failed is asked again"
    again = of_size("max", boundary, lambda n: 0)
    assert again.batch == SEARCHED[found]


def test_sizes_that_all_fit_and_none_that_does():
    boundary, made = searched(lambda n: 1, lambda n: 1)
    assert of_size("max", boundary, lambda n: 1).batch == 8000
    assert made == [8000]
    boundary, made = searched(lambda n: ROOM + n, lambda n: n)
    with pytest.raises(BudgetError, match="no size fits: 8, the least of `sizes`, needs"):
        boundary.find()


def test_a_size_that_others_say_fits_is_planned_once_more():
    true, tried = lambda n: 2000 + 3 * n, []

    def plan_at(size):
        tried.append(size)
        # The planner's first search for some sizes finds nothing that fits.
        if true(size) > ROOM or (size in (2048, 2664) and tried.count(size) == 1):
            raise BudgetError("found none", least_bytes=int(1.2 * true(size)))
        return dataclasses.replace(plans.plan(), points=(Point(int(true(size)), 1.0),))

    boundary = Boundary(range(8, 8001, 8), lambda n: int(1.3 * true(n)), ROOM, plan_at)
    assert boundary.sizes[boundary.find()] == 2664
    assert tried.count(2664) == 2
    assert len(tried) <= 9


def test_an_error_without_bytes_is_raised_as_it_is():
    def plan_at(size):
        raise BudgetError("no assignment needs so little host memory")

    with pytest.raises(BudgetError, match="^no assignment needs"):
        Boundary(SEARCHED, lambda n: n, ROOM, plan_at).find()


def test_the_fastest_lies_where_everything_is_kept_or_beyond():
    seconds = lambda n: n if n <= 2048 else n * 1.3
    boundary, made = searched(lambda n: 2 * n, lambda n: 2 * n, seconds=seconds)
    plan = of_size("fastest", boundary, lambda n: n * ROOM // 2048)
    assert plan.batch == 2048
    assert len(made) <= 8
    assert all(n >= 2048 for n in made)


def arguments():
    return W, rows(4096)


@functools.cache
def whole():
    return jaxmem.plan(build, *arguments(), microbatches=(4, 1, 2))


def test_with_room_to_spare_it_is_one():
    assert whole().microbatches == 1
    assert whole().keeps_everything
    assert "; microbatches: 1" in str(whole())


def test_under_a_budget_more_are_taken_and_the_file_says_how_many(tmp_path):
    held = whole().parts.arguments  # a budget that holds no more than these
    with pytest.raises(BudgetError, match="least that compiled") as one:
        jaxmem.plan(build, *arguments(), microbatches=(1,), budget=held, actions=("keep",))
    budget = one.value.least_bytes - 1
    plan = jaxmem.plan(build, *arguments(), microbatches=(1, 2), budget=budget, actions=("keep",))
    assert plan.microbatches == 2, "the least with one microbatch is more"
    assert plan.compiled_bytes <= budget
    assert jnp.isfinite(loss_of(plan, 4096))
    loaded, path = plans.reloaded(plan, tmp_path), tmp_path / "plan.json"
    assert loaded.microbatches == plan.microbatches
    assert jaxmem.verify(loaded, build, *arguments()).compiled_bytes == plan.compiled_bytes
    assert jaxmem.explain(build, *arguments(), plan=loaded).total_bytes == plan.compiled_bytes
    path.write_text(path.read_text().replace('"microbatches": 2', '"microbatches": 0'))
    with pytest.raises(PlanFileError, match="field `microbatches`: got 0"):
        jaxmem.Plan.load(path)


def test_none_that_fits_names_the_least():
    def plan_for(number):
        raise BudgetError(f"too small for {number}", least_bytes=100 // number)

    with pytest.raises(BudgetError, match="none of 1, 4 .*; the least, 25 B, is with 4:") as caught:
        fastest_plan([1, 4], plan_for)
    assert caught.value.least_bytes == 25


@pytest.mark.parametrize("numbers", [(), (0,), (1.5,), (True,), ("2",), (2, -1)])
def test_numbers_that_are_none_are_refused(numbers):
    with pytest.raises(StepError, match="`microbatches` is .*expected whole numbers of at least 1"):
        jaxmem.plan(build, *arguments(), microbatches=numbers)


def test_the_fastest_is_taken_and_the_search_ends_where_everything_is_kept():
    seconds, asked = {1: None, 2: 3.0, 4: 2.0, 8: 2.5}, []

    def plan_for(number):
        asked.append(number)
        if seconds[number] is None:
            raise BudgetError("too large", least_bytes=9)
        kept = {"block": {UNTAGGED: KEEP} if number == 8 else {"in": KEEP}}
        return dataclasses.replace(whole(), predicted_seconds=seconds[number], actions=kept)

    assert fastest_plan([1, 2, 4, 8, 16], plan_for).microbatches == 4
    assert asked == [1, 2, 4, 8]
