"""Makes a Plan with its table from a finished search."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxmem._core.actions import AS_WRITTEN, KEEP, UNTAGGED, Actions
from jaxmem._core.bytes import show_bytes
from jaxmem._core.groups import keeps_everything, span_of
from jaxmem._planner.advice import held_by_schedule
from jaxmem._planner.outcome.pareto import curve, whole_actions
from jaxmem._planner.outcome.table import rows
from jaxmem._planner.search.candidates import solve_fastest
from jaxmem._planner.search.measure import Runs, quartiles
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import StepTime
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Measured, WrittenStep


def searched_plan(
    search: Search,
    notes: tuple[str, ...] = (),
    runs: Sequence[Runs] = (),
    taken: str | None = None,
) -> Plan:
    """Returns the plan that a search found, with its table and its curve of other budgets.

    search: the search, which has found a best plan.
    notes: sentences for the user.
    runs: the steps that were run for comparison.
    taken: why the plan has its actions, if the solver did not choose them.
    """
    best = search.best
    assert best is not None
    profile, baseline, model = search.profile, search.baseline, search.model()
    compiler = search.compiler
    step_time = search.step_time
    problem = search.problem(model)
    # The table shows the decided problem, with divided layers if the plan divides layers, within
    # the room that the memory model leaves. The curve always has undivided layers.
    decided = search.divided_problem or problem
    decided = dataclasses.replace(decided, room=problem.room, corrections=search.corrections)
    is_as_written = best is search.with_checkpoints
    actions = AS_WRITTEN if is_as_written else whole_actions(decided.profile, best.actions)
    # A plan keeps everything only if every block keeps everything. So idle blocks are kept if all
    # other blocks are kept.
    of_idle_blocks = {UNTAGGED: KEEP} if keeps_everything(actions) else {}
    idle = () if is_as_written else profile.idle_blocks
    total = lambda size: search.predicted(int(model.reference) + size)
    why = "the clock says otherwise" if runs else taken
    return Plan(
        actions={label: dict(of_idle_blocks) for label in idle} | actions,
        budget_bytes=search.limits.budget,
        predicted_bytes=best.predicted_bytes,
        compiled_bytes=best.total,
        baseline_bytes=baseline.total,
        host_bytes=best.host_bytes,
        predicted_seconds=step_time.of(best),
        baseline_seconds=step_time.base,
        baseline_source=step_time.source,
        uncertain_seconds=step_time.uncertainty_of(best.cost),
        profile_seconds=search.profile_seconds,
        solve_seconds=search.solve_seconds,
        compile_seconds=compiler.seconds,
        compiles=compiler.compiles,
        time_source=profile.time_source,
        target=str(compiler.backend.target),
        fingerprint=profile.fingerprint,
        jax_version=jax.__version__,
        parts=_parts(search, best),
        baseline_parts=_parts(search, baseline),
        rows=() if is_as_written else rows(decided, actions, why),
        points=curve(problem, total, step_time, baseline.total),
        notes=notes
        + span_notes(actions)
        + held_by_schedule(search, best)
        + option_notes(best.step.compiled.options),
        compiler_options=best.step.compiled.options,
        measured=tuple(_measured(run, run.trial is best) for run in runs),
        as_written=best is search.trial_as_written,
        written=_written(search, step_time),
        lossy=_lossy(search, best, step_time, problem),
    ).with_step(best.step.compiled.executable)


def _lossy(search: Search, best: Trial, step_time: StepTime, problem: ActionProblem) -> str:
    """A phrase that names the tensors that the plan saves with a loss, and the time of the best
    lossless plan. Empty for a lossless plan.
    """
    names = [
        f"{b.name}/{n}" if len(best.cost.blocks) > 1 else n
        for b in best.cost.blocks
        for n in b.lossy
    ]
    if not names:
        return ""
    named = ", ".join(dict.fromkeys(names))
    exact = [t for t in search.fitting if not t.cost.is_lossy]
    if exact:
        other = min(exact, key=step_time.of)
        seconds, cost = step_time.of(other), other.cost
        lossless = f"the fastest plan without loss, compiled to {show_bytes(other.total)}, takes"
    else:
        solution = solve_fastest(problem.lossless())
        if solution is None:
            return f"{named}; no plan without loss is predicted to fit"
        seconds, cost = step_time.seconds(solution.cost), solution.cost
        lossless = "the fastest plan without loss is predicted to take"
    more, error = seconds - step_time.of(best), step_time.uncertainty_of(best.cost, cost)
    return f"{named}; {lossless} {1e3 * more:.2f} ms more, ± {1e3 * error:.2f} ms"


def _written(search: Search, step_time: StepTime) -> WrittenStep | None:
    """Bytes and seconds of the step as written; None if it has no checkpoints of its own."""
    if (trial := search.with_checkpoints) is None:
        return None
    return WrittenStep(trial.total, trial.host_bytes, step_time.of(trial), _parts(search, trial))


def span_notes(actions: Actions) -> tuple[str, ...]:
    """A note for the user about each block whose layers the plan runs in spans."""
    spans = {label: span_of(label) for label in actions if span_of(label) > 1}
    return tuple(
        f"{label!r}: the layers run in spans of {span}; only the input of a span's first layer is"
        " saved through the step, and the backward runs each span forward again before it"
        for label, span in spans.items()
    )


def option_notes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """A note for the user about the XLA options with which the step was compiled, if any."""
    if not options:
        return ()
    return (
        "copies to host memory and back run beside work where the step is compiled with"
        " compiler_options=plan.compiler_options, as plan.step is",
    )


def _measured(run: Runs, chosen: bool) -> Measured:
    size = run.trial.total
    return Measured(run.name, size, *quartiles(run.rounds), len(run.rounds), chosen)


def _parts(search: Search, trial: Trial) -> Bytes:
    return Bytes.of(trial.total, search.static, trial.cost.saved_bytes)
