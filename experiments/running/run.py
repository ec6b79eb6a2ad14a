"""Runs any kind of experiment: from data and a plan to a folder of results."""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax

import jaxmem.runs
from experiments.command.processes import ending_together, heed_preemption
from experiments.config.sections import Trained
from experiments.errors import DivergedError
from experiments.running.planning import Ready
from experiments.running.record import course, lasting
from experiments.running.shown import Progress, table
from jaxmem.plans import Plan

C = TypeVar("C", bound=Trained)
D = TypeVar("D")


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[C, D]):
    """A kind of experiment, as functions of its config and its data.

    `check(config)` raises InputError for settings that no run can use, before data are read.
    `read(config)` -> data, and `says(config, data)` -> a line about the data.
    `step(config, data)` -> the compiled step, and `first_state(config, plan)` -> its first state. A
    plan may place states.
    `batch(config, data, number)` -> the second argument of step `number`; numbers start at 1.
    `evaluate(config, state, data)` -> results about the trained state, for the summary. Results
    include `val_loss`; a text `sample` is also written to a file.
    `told(found)` -> the results to print, by name.
    `count(config)`: the number of units in a step. `unit`: the unit of speed, such as tokens.
    `remedy`: the advice if the loss is not finite. `within(config)`: the context in which the state
    is made, trained and evaluated, such as a mesh.
    """

    check: Callable[[C], None]
    read: Callable[[C], D]
    says: Callable[[C, D], str]
    first_state: Callable[[C, Plan | None], Any]
    step: Callable[[C, D], Ready]
    batch: Callable[[C, D, int], Any]
    evaluate: Callable[[C, Any, D], dict[str, Any]]
    told: Callable[[dict[str, Any]], Mapping[str, str]]
    unit: str
    count: Callable[[C], int]
    remedy: str
    within: Callable[[C], contextlib.AbstractContextManager] = lambda _: contextlib.nullcontext()


def run(
    experiment: Experiment[C, D],
    config: C,
    out: pathlib.Path,
    *,
    name: str,
    overwrite: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Trains and evaluates, then writes results to `out`. A stopped run resumes from its last
    checkpoint in `out`.

    The summary contains `name` and `command`, the command line that repeats the run. `overwrite`:
    whether to replace the results of an earlier run in `out`. Returns the content of summary.json.
    """
    experiment.check(config)
    rows: dict[int, Mapping[str, float]] = {}
    written = {"overwrite": overwrite, "tensorboard": config.train.tensorboard}
    with jaxmem.runs.record(out, resume=True, **written) as results:
        data = experiment.read(config)
        said = experiment.says(config, data)
        if results.writes:
            print(said, file=sys.stderr)
        ready = experiment.step(config, data)
        config = config.of_size(ready.plan and ready.plan.batch)
        if results.writes:
            _announce(ready)
        if ready.plan is not None:
            results.plan(ready.plan)
        if ready.explained is not None:
            results.explained(ready.explained)
        t = config.train
        progress = Progress(t.steps, t.log_every, experiment.unit, experiment.count(config))

        def record(number: int, row: Mapping[str, float]) -> None:
            rows[number] = row  # a repeated step replaces its earlier row
            if results.writes:
                progress(number, row.get("loss"))

        begun = time.perf_counter()
        with experiment.within(config), ending_together():
            with progress:
                state = train(experiment, config, data, ready, results, record)
            found = experiment.evaluate(config, state, data)
        if "sample" in found:
            results.sample(found["sample"])
        if ready.rectifier is not None:  # the rectifier may have replaced the plan
            ready = dataclasses.replace(ready, plan=ready.rectifier.plan)
        summary = {"config": name, "settings": config.model_dump(), "data": said}
        unit, count = experiment.unit, experiment.count(config)
        summary |= course([*results.kept, *rows.values()], unit, count) | found | of_step(ready)
        summary |= {
            "seconds": time.perf_counter() - begun,
            "jax_version": jax.__version__,
            "command": command,
        }
        results.summary(summary)
    if not results.writes:
        return summary
    shown = dict(experiment.told(found))
    if ready.plan is not None:
        jaxmem.plans.report(ready.plan, out / "report.html", run=out)
        shown["page"] = str(out / "report.html")
    table(shown | {"results": str(out)})
    return summary


def train(
    experiment: Experiment[C, D],
    config: C,
    data: D,
    ready: Ready,
    results: jaxmem.runs.Record,
    record: Callable[[int, Mapping[str, Any]], None],
) -> Any:
    """Returns the state after all steps. Calls `record(number, row)` one step behind the device.
    Raises DivergedError if losses are not finite.
    """
    try:
        return jaxmem.runs.train(
            ready.step,
            functools.partial(experiment.first_state, config, ready.plan),
            heed_preemption(functools.partial(experiment.batch, config, data)),
            steps=config.train.steps,
            run=results,
            save_every=config.train.save_every,
            settings=lasting(config.model_dump()),
            units={experiment.unit: experiment.count(config)},
            each=record,
            rectifier=ready.rectifier,
        )
    except jaxmem.errors.NotFiniteError as error:
        said = str(error).removeprefix("train: ")
        raise DivergedError(f"{said}; {experiment.remedy}") from error


def of_step(ready: Ready) -> dict[str, Any]:
    """Returns the summary's entries about the step: its policy, its bytes, and its search."""
    plan = ready.plan
    seconds = ("profile", "solve", "compile")
    return {
        "policy": ready.policy,
        "found": ready.found,
        "target": plan.target if plan else "local",
        "budget_bytes": plan and plan.budget_bytes,
        "predicted_bytes": plan and plan.predicted_bytes,
        "compiled_bytes": plan.compiled_bytes if plan else ready.compiled_bytes,
        "baseline_bytes": ready.baseline_bytes,
        "plan_seconds": plan and {name: getattr(plan, f"{name}_seconds") for name in seconds},
        "compiles": plan.compiles if plan else ready.compiles,
        "time_source": plan and plan.time_source,
    }


def _announce(ready: Ready) -> None:
    plan = ready.plan
    if plan is None:
        return
    print(plan, flush=True)
    if ready.compiled_bytes > plan.budget_bytes:
        print(
            f"warning: on this device the plan for {plan.target} takes {ready.compiled_bytes:,}"
            f" bytes of a budget of {plan.budget_bytes:,}",
            file=sys.stderr,
        )
