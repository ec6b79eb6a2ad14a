"""Makes of a finished search what the user gets: a Plan with its table, or the error that names the
least bytes and what holds them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxmem._core.actions import AS_WRITTEN, KEEP, REST, keeps_everything
from jaxmem._core.bytes import show_bytes
from jaxmem._planner.outcome.pareto import curve, whole_actions
from jaxmem._planner.outcome.table import rows
from jaxmem._planner.search.candidates import fastest
from jaxmem._planner.search.measure import Runs, quartiles
from jaxmem._planner.search.search import Found
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import StepTime
from jaxmem._planner.search.trial import Limits, Trial
from jaxmem._planner.solve.problem import Problem
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Measured, WrittenStep
from jaxmem._target.devices.target import Target
from jaxmem.errors import BudgetError

# What takes a step's bytes, in the order of the fields of `Bytes`, and what to do about it.
SAVED = "tensors saved for the backward"
ADVICE = {
    "arguments and model states": "use a smaller model, lower-precision states, or more devices",
    SAVED: "allow more actions, or tag more tensors",
    "working memory of the head and one block": "chunk the loss, or use a smaller batch, or more"
    " microbatches",
}


def outcome(
    found: Found,
    notes: tuple[str, ...] = (),
    runs: Sequence[Runs] = (),
    taken: str | None = None,
) -> Plan:
    """Returns the plan that a search found, with its table and its curve of other budgets.

    found: what the search ended with, a best plan among it.
    notes: sentences for the user.
    runs: the steps that were run to be compared.
    taken: why its actions are the plan's, where the solver did not take them.
    """
    search, best, division = found.search, found.best, found.division
    assert best is not None
    profile, baseline, model = search.profile, search.baseline, search.model()
    steps = search.steps
    step_time = search.step_time
    problem = search.problem(model)
    # The table is of what was decided, of divided layers too, within the room that the memory model
    # leaves. The curve is always of undivided layers.
    decided = division.problem if division else problem
    decided = dataclasses.replace(decided, room=problem.room, corrections=found.corrections)
    own = best is search.checkpointed
    actions = AS_WRITTEN if own else whole_actions(decided.profile, best.actions)
    # Idle blocks follow the others: a plan keeps everything only if every block of it does.
    of_idle_blocks = {REST: KEEP} if keeps_everything(actions) else {}
    idle = () if own else profile.idle_blocks
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
        uncertain_seconds=step_time.uncertain(best.cost),
        profile_seconds=search.profile_seconds,
        solve_seconds=search.solve_seconds,
        compile_seconds=steps.seconds,
        compiles=steps.compiles,
        time_source=profile.time_source,
        target=str(steps.backend.target),
        fingerprint=profile.fingerprint,
        jax_version=jax.__version__,
        parts=_parts(search, best),
        baseline_parts=_parts(search, baseline),
        rows=() if own else rows(decided, actions, "the clock says otherwise" if runs else taken),
        points=curve(
            problem,
            lambda size: search.predicted(int(model.reference) + size),
            step_time.seconds,
            step_time.uncertain,
            baseline.total,
        ),
        notes=notes + option_notes(best.step.compiled.options),
        compiler_options=best.step.compiled.options,
        measured=tuple(_measured(run, run.trial is best) for run in runs),
        as_written=best is search.written,
        written=_written(search, step_time),
        lossy=_lossy(search, best, step_time, problem),
    ).with_step(best.step.compiled.executable)


def _lossy(search: Search, best: Trial, step_time: StepTime, problem: Problem) -> str:
    """Which tensors the plan holds with a loss, and what the best plan without one would take;
    empty where it loses nothing.
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
        more, off = (
            step_time.of(other) - step_time.of(best),
            step_time.uncertain(best.cost, other.cost),
        )
        said = f"the fastest plan without loss, compiled to {show_bytes(other.total)}, takes"
    else:
        solution = fastest(problem.lossless())
        if solution is None:
            return f"{named}; no plan without loss is predicted to fit"
        more = step_time.seconds(solution.cost) - step_time.of(best)
        off = step_time.uncertain(best.cost, solution.cost)
        said = "the fastest plan without loss is predicted to take"
    return f"{named}; {said} {1e3 * more:.2f} ms more, ± {1e3 * off:.2f} ms"


def _written(search: Search, step_time: StepTime) -> WrittenStep | None:
    """The step as written, where it has checkpoints of its own."""
    if (own := search.checkpointed) is None:
        return None
    return WrittenStep(own.total, own.host_bytes, step_time.of(own), _parts(search, own))


def option_notes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what to tell the user of XLA's options that the step was compiled with, if any."""
    if not options:
        return ()
    return (
        "copies to host memory and back run beside work where the step is compiled with"
        " compiler_options=plan.compiler_options, as plan.step is",
    )


def _measured(run: Runs, chosen: bool) -> Measured:
    size = run.trial.total
    return Measured(run.name, size, *quartiles(run.rounds), len(run.rounds), chosen)


def arguments_exceed(arguments: int, limits: Limits, target: Target, remedies: str) -> BudgetError:
    """Returns the error of a budget that the step's arguments alone exceed, before anything is
    compiled.

    arguments: their bytes on one device.
    remedies: what would make them smaller, as the end of a sentence.
    """
    each = _each(target)
    return BudgetError(
        f"plan: `budget` is {show_bytes(limits.budget)}, and the step's arguments alone take"
        f" {show_bytes(arguments)} ({arguments} bytes){each} for target {str(target)!r}. Every plan"
        " takes more, so none was compiled: give a larger budget, or"
        f" {ADVICE['arguments and model states']}{_margin(limits)}"
        + (f". {remedies[0].upper()}{remedies[1:]}" if remedies else ""),
        least_bytes=arguments,
    )


def infeasible(search: Search, unnamed: str = "", hint: str = "") -> BudgetError:
    """Returns the error that names the least that compiled, and the largest of its parts.

    unnamed: the largest tensors that no tag names, as a text; empty where there is none.
    hint: what else the end of its sentence says.
    """
    least, target = search.smallest, search.steps.backend.target
    parts = dict(zip(ADVICE, dataclasses.astuple(_parts(search, least))))
    holder = max(parts, key=lambda k: parts[k])
    message = (
        f"plan: `budget` is {show_bytes(search.limits.budget)}, and the least that compiled is"
        f" {show_bytes(least.total)} ({least.total} bytes){_each(target)} for target"
        f" {str(target)!r}, of {len(search.compiled)} assignments: "
        + ", ".join(f"{show_bytes(v)} {k}" for k, v in parts.items())
        + f"; the largest part is {holder}: {ADVICE[holder]}{_margin(search.limits)}"
    )
    if unnamed and holder == SAVED:
        message += f"; the largest tensors that no tag names are {unnamed}"
    if least.host_bytes:
        message += f"; host memory needed: {show_bytes(least.host_bytes)}"
    return BudgetError(message + hint, least_bytes=least.total)


def _each(target: Target) -> str:
    """What an error says after bytes; empty for a single device."""
    several = not target.local and target.devices > 1
    return f" on each of {target.devices} devices" if several else ""


def _margin(limits: Limits) -> str:
    """The end of an error's sentence, about the share of the budget that a plan may not use; empty
    where there is none.
    """
    margin = 1 - limits.usable_bytes / limits.budget
    if not 1e-3 < margin < 0.5:  # a larger share is the rounding of a budget of a few bytes
        return ""
    return f"; {margin:.0%} of the budget is left for what the device takes beside a step's buffers"


def _parts(search: Search, trial: Trial) -> Bytes:
    return Bytes.of(trial.total, search.static, trial.cost.saved_bytes)
