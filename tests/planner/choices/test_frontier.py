"""The frontier over sizes of the batch and budgets: its estimates against plans, and what of it is
compiled.
"""

import dataclasses
import functools
import json
import statistics

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._result.frontier import Cell, Frontier
from jaxmem.errors import BudgetError, PlanFileError, StepError, TargetError
from jaxmem.plans import frontier
from tests.shared import models, plans, tiny_lm

KIB = 2**10
BATCHES = (256, 512, 1024)
BUDGETS = ("600KiB", "1MiB", "2MiB", "6MiB")
LOSSLESS = {"actions": "lossless"}


def build(plan, microbatches=1):
    layers = functools.partial(models.scanned, block=models.narrow)
    return models.build_with(layers, microbatches)(plan)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


W = {"up": shape(6, 32, 64), "down": shape(6, 64, 32)}


def rows(n):
    return shape(n, 32)


@pytest.fixture(scope="module")
def made(own_database):
    return frontier(build, W, rows, batches=BATCHES, budgets=BUDGETS, tokens=7, **LOSSLESS)


def cell_at(found, batch, budget):
    (cell,) = [c for c in found.cells if (c.batch, c.budget_bytes) == (batch, budget)]
    return cell


def test_there_is_a_cell_for_each_size_and_each_budget(made):
    assert made.batches == BATCHES
    assert made.budgets == (600 * KIB, 1024 * KIB, 2048 * KIB, 6144 * KIB)
    places = [(cell.batch, cell.budget_bytes) for cell in made.cells]
    assert places == [(batch, budget) for batch in made.batches for budget in made.budgets]
    assert made.tokens == 7
    fits = [cell.seconds is not None for cell in made.cells]
    assert any(fits)
    assert not all(fits), "the test is of budgets on both sides"


def test_more_budget_is_never_slower_and_a_larger_size_never_smaller(made):
    for batch in BATCHES:
        row = [cell for cell in made.cells if cell.batch == batch]
        rates = [cell.throughput for cell in row]
        assert rates == sorted(rates)
        assert all(cell.bytes <= cell.budget_bytes for cell in row if cell.seconds is not None)
        # All cells that do not fit have the bytes of the smallest plan, which exceed their budget.
        least = {cell.bytes for cell in row if cell.seconds is None}
        assert len(least) <= 1
        assert all(cell.bytes > cell.budget_bytes for cell in row if cell.seconds is None)
    for budget in made.budgets:
        fits = [cell.seconds is not None for cell in made.cells if cell.budget_bytes == budget]
        assert fits == sorted(fits, reverse=True)


@pytest.mark.slow
def test_a_cell_fits_if_and_only_if_a_plan_fits(made):
    for cell in made.cells:
        if 0.9 < cell.bytes / cell.budget_bytes < 1.1:
            continue  # estimates are no more exact
        arguments = {"budget": cell.budget_bytes} | LOSSLESS
        try:
            jaxmem.plan(build, W, rows(cell.batch), **arguments)
        except BudgetError:
            assert cell.seconds is None, cell
        else:
            assert cell.seconds is not None, cell


def test_the_best_size_of_each_budget_is_compiled_within_it(made):
    for budget in made.budgets:
        column = [cell for cell in made.cells if cell.budget_bytes == budget]
        if not any(cell.throughput for cell in column):
            with pytest.raises(BudgetError, match="Frontier.best: no size fits a budget") as error:
                made.best(budget)
            assert error.value.least_bytes == min(cell.bytes for cell in column)
            continue
        plan = made.best(budget)
        assert plan.compiled_bytes <= budget
        assert plan.batch in BATCHES
        w = jax.tree.map(lambda a: jnp.full(a.shape, 0.1), W)
        ran = plan.step(w, jnp.ones((plan.batch, 32)))
        assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves(ran))


def test_estimates_are_near_the_compiled_bytes_and_seconds_are_scaled_to_the_plans(made):
    compiled = [cell for cell in made.cells if cell.plan is not None]
    assert len(compiled) > 1
    for cell in compiled:
        assert cell.bytes == pytest.approx(cell.plan.compiled_bytes, rel=0.25)
    ratios = [cell.plan.predicted_seconds / cell.seconds for cell in compiled]
    assert statistics.geometric_mean(ratios) == pytest.approx(1.0)


def test_a_file_holds_the_whole_frontier(made, tmp_path):
    made.save(tmp_path / "frontier.json")
    read = Frontier.load(tmp_path / "frontier.json")
    assert read == made
    assert str(read) == str(made)
    assert read.to_json() == made.to_json() == json.loads((tmp_path / "frontier.json").read_text())
    budget = made.budgets[-1]
    assert read.best(budget) == made.best(budget)
    assert not read.best(budget).is_compiled


def test_the_table_has_the_numbers_of_every_cell(made):
    lines = str(made).splitlines()
    for line, batch in zip(lines[1:], BATCHES):
        row = [cell for cell in made.cells if cell.batch == batch]
        assert line.startswith(str(batch))
        assert line.count(" ms, ") == sum(cell.seconds is not None for cell in row)
        assert line.count("needs ") == sum(cell.seconds is None for cell in row)
        assert line.count("*") == sum(cell.batch == batch for cell in made.pareto())
    assert "tokens/s" in lines[len(BATCHES) + 1]
    best = made.best("6MiB")
    assert lines[-1].startswith(f"6.0 MiB: batch {best.batch}, compiled to ")


def test_no_cell_is_compiled_for_its_estimate(monkeypatch, own_database):
    planned, compiles = [], lambda *_: pytest.fail("an estimate compiles nothing")

    def plan(build, *args, budget, **_):
        planned.append((args[1].shape[0], budget))
        return plans.plan()

    monkeypatch.setattr(StepCompiler, "try_compile_buffers", compiles)
    monkeypatch.setattr("jaxmem._planner.frontier.plan", plan)
    found = frontier(build, W, rows, batches=(512, 256), budgets=("2MiB", "6MiB"), **LOSSLESS)
    assert planned
    for batch, budget in planned:
        column = [cell for cell in found.cells if cell.budget_bytes == budget]
        assert cell_at(found, batch, budget).throughput == max(c.throughput for c in column)


def test_a_size_that_exceeds_its_budget_gives_way_to_the_next_best(monkeypatch, own_database):
    refused = []

    def plan(build, *args, budget, **_):
        if not refused:
            refused.append(args[1].shape[0])
            raise BudgetError("too large", least_bytes=budget + 1)
        return plans.plan(compiled_bytes=budget)

    monkeypatch.setattr("jaxmem._planner.frontier.plan", plan)
    found = frontier(build, W, rows, batches=(256, 512), budgets=("6MiB",), **LOSSLESS)
    (first,) = refused
    (other,) = {256, 512} - {first}
    cell = cell_at(found, first, 6 * 2**20)
    assert (cell.seconds, cell.bytes, cell.plan) == (None, 6 * 2**20 + 1, None)
    assert found.best("6MiB").batch == other


ESTIMATED = {256: (400 * KIB, 1.0), 512: (700 * KIB, 1.2)}  # bytes and seconds of a size
COMPILED = {256: 390 * KIB, 512: 600 * KIB}


@pytest.fixture
def estimates_above_compiled_bytes(monkeypatch):
    """Returns the pairs (size, budget) that are planned."""
    planned = []

    def estimated(build, args, backend, limits, allowed, decide, cell):
        size, seconds = ESTIMATED[cell.batch]
        return [(seconds, dataclasses.replace(cell, bytes=size, seconds=seconds))]

    def plan(build, *args, budget, **_):
        size = args[1].shape[0]
        planned.append((size, budget))
        if COMPILED[size] > budget:
            raise BudgetError("too large", least_bytes=COMPILED[size])
        return plans.plan(
            compiled_bytes=COMPILED[size], host_bytes=0, predicted_seconds=ESTIMATED[size][1]
        )

    monkeypatch.setattr("jaxmem._planner.frontier._estimated", estimated)
    monkeypatch.setattr("jaxmem._planner.frontier.plan", plan)
    return planned


@pytest.mark.parametrize(
    ("budget", "least"), [(650 * KIB, None), (550 * KIB, 600 * KIB), (450 * KIB, 700 * KIB)]
)
def test_the_smallest_size_is_compiled_if_no_estimate_fits(
    estimates_above_compiled_bytes, budget, least
):
    make = functools.partial(frontier, build, W, rows, batches=(512,), budgets=(budget,))
    if least is None:
        (cell,) = make().cells
        assert (cell.bytes, cell.plan.compiled_bytes) == (600 * KIB, 600 * KIB)
    else:
        with pytest.raises(BudgetError) as refused:
            make()
        assert refused.value.least_bytes == least
    assert estimates_above_compiled_bytes == [(512, budget)] * (budget > 500 * KIB)


def test_a_plan_of_a_larger_budget_is_used_for_a_smaller_one_that_it_fits(
    estimates_above_compiled_bytes,
):
    budgets = 500 * KIB, 650 * KIB, 2048 * KIB
    found = frontier(build, W, rows, batches=(256, 512), budgets=budgets)
    best = [found.best(budget) for budget in budgets]
    assert [plan.compiled_bytes for plan in best] == [390 * KIB, 600 * KIB, 600 * KIB]
    assert [plan.budget_bytes for plan in best[:2]] == list(budgets[:2])
    assert cell_at(found, 512, 500 * KIB).seconds is None
    assert len(estimates_above_compiled_bytes) == 2, "the budget between is not planned"


def test_microbatches_are_chosen_for_each_cell(own_database):
    sizes = {"batches": (1024,), "budgets": ("1MiB", "6MiB"), "microbatches": (1, 4)}
    found = frontier(build, W, rows, **sizes, **LOSSLESS)
    one, other = found.cells
    assert one.microbatches == 4, "the size does not fit otherwise"
    assert found.best("1MiB").microbatches == 4
    assert other.microbatches in (1, 4)


def test_where_nothing_fits_the_least_bytes_are_named(own_database):
    with pytest.raises(BudgetError, match=r"no size fits any of `budgets`: .*, of size 256") as one:
        frontier(build, W, rows, batches=(512, 256), budgets=("100KiB",), **LOSSLESS)
    assert one.value.least_bytes > 100 * KIB


def released(plan, microbatches=2):
    tx = jaxmem.adama(1e-3, accumulation_steps=microbatches)
    return tiny_lm.released(tx, plan=plan)


@pytest.mark.slow
def test_states_are_placed_in_each_cell(own_database):
    params = jax.eval_shape(lambda: tiny_lm.parameters(jnp.float32, width=64, vocab=64))
    state = jax.eval_shape(released(None).init, params)
    tokens = lambda n: jax.ShapeDtypeStruct((n, 65), jnp.int32)
    sizes = {"batches": (16,), "budgets": ("1.5MiB", "3MiB")}
    found = frontier(released, state, tokens, **sizes, decide=("actions", "states"), **LOSSLESS)
    small, large = found.cells
    assert small.host_bytes > large.host_bytes, "states of layers are in host memory"
    plan = found.best("3MiB")
    assert plan.places is not None
    assert plan.compiled_bytes <= plan.budget_bytes
    assert large.bytes == pytest.approx(plan.compiled_bytes, rel=0.25)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batches": ()}, StepError, r"frontier: `batches` is \(\); expected whole numbers"),
        ({"batches": (0,)}, StepError, "frontier: `batches` is .*; expected whole numbers"),
        ({"budgets": ()}, StepError, r"frontier: `budgets` is \(\); expected several budgets"),
        ({"budgets": "2MiB"}, StepError, "frontier: `budgets` is '2MiB'; expected several"),
        ({"budgets": ("2MiX",)}, BudgetError, "`budgets` is '2MiX'"),
        ({"tokens": 0}, StepError, r"frontier: `tokens` is \[0\]; expected whole numbers"),
        ({"target": "h900"}, TargetError, "h900"),
        ({"decide": ("states",)}, StepError, "`decide` is"),
        ({"microbatches": (0,)}, StepError, "`microbatches` is"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, error, message):
    given = {"batches": (8,), "budgets": ("2MiB",)} | arguments
    with pytest.raises(error, match=message):
        frontier(build, W, rows, **given)


def test_arguments_without_a_function_of_the_size_are_refused():
    message = "frontier: `batches` is .*none of the step's arguments is a function of a size"
    with pytest.raises(StepError, match=message):
        frontier(build, W, rows(8), batches=(8,), budgets=("2MiB",))


def test_a_run_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(StepError, match="frontier: called in one of 2 processes"):
        frontier(build, W, rows, batches=(8,), budgets=("2MiB",))


CELLS = st.lists(
    st.tuples(st.integers(1, 6), st.one_of(st.none(), st.integers(1, 6))), min_size=1, max_size=8
)


@given(CELLS)
def test_the_pareto_cells_are_those_that_no_other_dominates(numbers):
    cells = tuple(Cell(12, i, bytes=n, seconds=s) for i, (n, s) in enumerate(numbers, start=1))
    found = Frontier(cells, "h200", 100, "xla").pareto()
    fitting = [cell for cell in cells if cell.seconds is not None]
    dominates = lambda a, b: (  # of equal cells, the one of the smaller budget
        (a.bytes <= b.bytes and a.seconds <= b.seconds)
        and ((a.bytes, a.seconds) != (b.bytes, b.seconds) or a.budget_bytes < b.budget_bytes)
    )
    expected = [c for c in fitting if not any(dominates(other, c) for other in fitting)]
    assert list(found) == sorted(expected, key=lambda cell: cell.bytes)


def by_hand():
    """Two sizes and two budgets; the plan of the smaller budget has the higher throughput."""
    of = lambda batch, budget, **fields: Cell(batch, budget, bytes=batch, **fields)
    plan = lambda batch, seconds: plans.plan(batch=batch, predicted_seconds=seconds)
    small = of(8, 10, seconds=0.1, plan=plan(8, 0.1)), of(8, 20, seconds=0.1)
    cells = *small, of(16, 10), of(16, 20, seconds=0.15, plan=plan(16, 0.3))
    return Frontier(cells, "h200", 100, "xla", tokens=3)


def test_the_best_plan_may_be_of_a_smaller_budget():
    found = by_hand()
    assert found.best(20) == found.best(10) == found.cells[0].plan
    assert found.best("20%") == found.best(20), "of the usable memory"
    with pytest.raises(StepError, match=r"`budget` is 15 \(15 bytes\); expected one of .*10, 20"):
        found.best(15)


def test_a_plan_without_a_time_is_the_best_only_where_it_is_alone():
    assert Cell(8, 10, bytes=8, seconds=0.0).throughput == 0.0
    timeless = plans.plan(batch=8, predicted_seconds=0.0)
    alone = Cell(8, 10, bytes=8, seconds=0.1, plan=timeless)
    found = Frontier((alone, Cell(8, 20, bytes=8, seconds=0.1)), "h200", 100, "xla")
    assert found.best(10) == found.best(20) == timeless
    assert "0.00 examples/s" in str(found)
    other = Cell(16, 10, bytes=9, seconds=0.1, plan=plans.plan(batch=16))
    assert Frontier((alone, other), "h200", 100, "xla").best(10).batch == 16


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda data: data.update(schema=7), "field `schema`: got 7, expected 1"),
        (lambda data: data.update(cells=[]), "field `cells`: .* expected one cell for each size"),
        (lambda data: data["cells"][1].update(batch=9), "expected one cell for each size"),
        (lambda data: data["cells"][0].update(seconds=-1.0), r"field `cells\[0\].seconds`"),
        (lambda data: data["cells"][0]["plan"].pop("actions"), r"`cells\[0\].plan.actions`"),
        (lambda data: data.update(speed=1), "field `speed`.*no such field"),
    ],
)
def test_a_broken_file_is_refused_with_the_field(broken, message, tmp_path):
    data = json.loads(json.dumps(by_hand().to_json()))
    broken(data)
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match=f"Frontier.load: .*{message}"):
        Frontier.load(path)
