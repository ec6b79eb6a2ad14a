"""plan() in several processes: the first one plans, and all compile its plan's step."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxmem._planner import multi_process as module
from jaxmem._planner.multi_process import by_the_first
from jaxmem._target.compile.options import SHARED_TUNING, tuned_alone
from jaxmem._target.processes import channel as channel_module
from jaxmem.errors import BudgetError, PlanFileError, RunError, TagError
from tests.shared import children, plans
from tests.shared.processes import together

CACHES = "fresh", "stored", "elsewhere"
MINE = threading.local()  # the channel of a thread's process


@pytest.fixture
def processes(monkeypatch):
    """Calls `work(channel)` in two processes, here threads, and returns what each of them returned
    or raised. `verified` holds what they compiled.
    """
    verified = []

    def verify(plan, build, *args):
        verified.append((MINE.channel.index, build, args))
        return plan.with_step(f"step of {MINE.channel.index}")

    monkeypatch.setattr(module, "joined", lambda: MINE.channel)
    monkeypatch.setattr(module, "verify", verify)

    def both(work):
        def own(channel):
            MINE.channel = channel
            return work(channel)

        return together(2, own)

    both.verified = verified
    return both


LOCAL = plans.plan(target="local")


def test_the_first_plans_and_all_compile_its_step(processes):
    calls = []

    @by_the_first
    def plan(build, *args, budget=None):
        calls.append((MINE.channel.index, budget))
        return LOCAL

    first, second = processes(lambda channel: plan("build", 1, 2, budget=channel.index + 7))
    assert calls == [(0, 7)]
    assert first == second == LOCAL
    assert (first.step, second.step) == ("step of 0", "step of 1")
    assert sorted(processes.verified) == [(0, "build", (1, 2)), (1, "build", (1, 2))]


def test_a_plan_for_other_devices_is_compiled_in_none(processes):
    """It has no step: the first process compiled it in processes of its own."""
    plan = by_the_first(lambda build: dataclasses.replace(LOCAL, target="h200"))
    first, second = processes(lambda channel: plan("build"))
    assert first == second
    assert processes.verified == []


def test_a_size_that_was_chosen_is_that_of_all(processes):
    plan = by_the_first(lambda build, x: dataclasses.replace(LOCAL, batch=6))
    processes(lambda channel: plan("build", lambda n: jax.ShapeDtypeStruct((n, 2), jnp.float32)))
    assert [x.shape for _, _, (x,) in processes.verified] == [(6, 2)] * 2


@pytest.mark.parametrize("error", [BudgetError("too small", 77, 81), TagError("unknown")])
def test_an_error_of_the_planner_is_that_of_all(processes, error):
    @by_the_first
    def plan(build):
        raise error

    first, second = processes(lambda channel: plan("build"))
    assert first is error
    assert type(second) is type(error)
    assert str(second) == str(error)
    for name in ("least_bytes", "least_budget"):
        assert getattr(second, name, None) == getattr(error, name, None)
    assert processes.verified == []


def test_a_process_in_which_the_step_does_not_compile_ends_the_call_in_all(processes, monkeypatch):
    def verify(plan, build, *args):
        if not MINE.channel.first:
            raise PlanFileError("another model")
        return plan

    monkeypatch.setattr(module, "verify", verify)
    first, second = processes(lambda channel: by_the_first(lambda build: LOCAL)("build"))
    assert isinstance(first, RunError)
    assert "process 1 of 2 failed: another model" in str(first)
    assert isinstance(second, PlanFileError)


def test_one_that_does_not_call_it_is_missed_before_anything_is_planned(processes, monkeypatch):
    plan = by_the_first(lambda build: pytest.fail("nobody is there to get the plan"))

    def work(channel):
        channel.wait(0.05)
        return plan("build") if channel.first else None

    monkeypatch.setattr(channel_module, "_SLICE", 0.01)
    first, _ = processes(work)
    assert isinstance(first, RunError)
    assert "process 1 of 2 does not answer" in str(first)


def test_one_process_compiles_a_step_of_several_without_the_others(monkeypatch):
    assert tuned_alone("cuda") == {}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert tuned_alone("cpu") == {}
    assert tuned_alone("cuda") == {SHARED_TUNING: False}
    # XLA knows the option by this name, and refuses one that it does not know.
    double = jax.jit(lambda x: 2 * x).lower(1.0)
    assert float(double.compile(tuned_alone("cuda"))(1.0)) == 2.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        double.compile({f"{SHARED_TUNING}s": False})


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What two processes of two devices each report of the plans that they made."""
    caches = [tmp_path_factory.mktemp(f"cache{number}") for number in range(2)]
    program, each = "tests.programs.planned_together", [(cache,) for cache in caches]
    return children.two(children.with_cpus(2), 240, program, each=each), caches


@pytest.mark.slow
def test_processes_get_one_plan_and_compile_one_program(reports):
    (first, second), caches = reports
    assert first["plan"] == second["plan"]
    assert first["plan"]["compiled_bytes"] <= first["plan"]["budget_bytes"]
    assert first["program"] == second["program"]
    assert first["bytes"] == second["bytes"] == first["plan"]["compiled_bytes"]
    assert (first["searches"], second["searches"]) == (3, 0), "with those for what was refused"
    assert any(caches[0].rglob("*.sqlite"))
    assert not any(caches[1].rglob("*")), "nothing was timed in the second process"
    assert first["devices"] == second["devices"] == 4


@pytest.mark.slow
def test_their_step_runs_in_all_of_them(reports):
    (first, second), _ = reports
    assert first["loss"] == second["loss"] == pytest.approx(first["want"], rel=1e-5)


@pytest.mark.slow
def test_what_cannot_be_planned_is_refused_in_all_of_them(reports):
    (first, second), _ = reports
    assert first["infeasible"] == second["infeasible"]
    kind, least = first["infeasible"]
    assert kind == "BudgetError"
    assert 100_000 < least <= first["plan"]["compiled_bytes"]
    assert first["otherwise"] == "RunError"
    assert second["otherwise"] == "PlanFileError", "it was another model there"
    note = "nothing was run for `measure`: it runs on several processes"
    assert note in first["measured"]
    assert first["measured"] == second["measured"]


@pytest.fixture(scope="module")
def jitted(tmp_path_factory):
    """What two processes of two devices each report of one step under `jaxmem.jit`. In the end
    process 1 reads the cache in which process 0 stored a plan, and process 0 reads an empty one.
    """
    first, second, empty = (tmp_path_factory.mktemp(name) for name in ("first", "second", "empty"))
    each = [(first, empty), (second, first)]
    environment = children.with_cpus(2)
    return children.two(environment, 480, "tests.programs.jitted_together", each=each), second


@pytest.mark.slow
@pytest.mark.parametrize("caches", CACHES)
def test_processes_run_one_program_under_jit_whatever_is_stored_where(jitted, caches):
    (first, second), _ = jitted
    ours, theirs = first[caches], second[caches]
    assert ours["plan"] == theirs["plan"]
    assert ours["program"] == theirs["program"]
    assert ours["plan"]["compiled_bytes"] <= first["budget"] == second["budget"]
    assert ours["losses"] == theirs["losses"] == pytest.approx(first["want"], rel=1e-5)
    assert first["want"][1] < first["want"][0]


@pytest.mark.slow
def test_the_first_process_alone_searches_and_recalls(jitted):
    (first, second), cache = jitted
    calls = {name: (first[name]["calls"], second[name]["calls"]) for name in CACHES}
    assert calls == {
        "fresh": (["recall_plan", "__wrapped__"], []),
        "stored": (["recall_plan"], []),
        "elsewhere": (["recall_plan", "__wrapped__"], []),
    }
    assert not any(cache.rglob("*")), "process 1 stores nothing"


@pytest.mark.slow
def test_a_step_without_layers_runs_in_all_processes_or_in_none(jitted):
    (first, second), _ = jitted
    assert (first["unplanned"], second["unplanned"]) == ("", "")
    assert (first["too large in one"], second["too large in one"]) == ("RunError", "BudgetError")
    found = first["too large in the first"], second["too large in the first"]
    assert found == ("BudgetError", "RunError")
