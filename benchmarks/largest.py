"""The largest GPT that one device trains with its host's memory: how much do states and activations
that move there gain, apart and together?

    python -m benchmarks.largest

Layers of gpt_10b (width 4096, heads of 128, 4 sequences of 1024 in one microbatch, no dropout),
released, float32 states and bfloat16 compute, for three GPUs that are not there, each with three
sizes of host memory. The number of layers is searched for, as `batch="max"` searches for a size:
the program of counts answers for any number of layers, since they are a loop, and says where to
look. What is reported was compiled: the fastest step of `joint`, the least of the others. That a
layer more does not fit is told by a walk through its least step, corrected by what walks of
compiled ones are off.

- `joint` places states and decides about tensors (`decide=("actions", "states")`).
- `states alone` recomputes every layer, `activations alone` leaves all states on the device, and
  `nothing moved` leaves tensors there too.
- `share` is the joint model's parameters against what device and host could hold at 12 bytes each:
  all of both but the temporaries of the step with nothing resident, as compiled, and 2 % of the
  device, which plans leave for autotuning. The joint plan may take fewer temporaries, and so reach
  more. `share of all memory` leaves nothing out.

Codecs are allowed. No step is run.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import optax

from benchmarks.placed import bytes_of
from benchmarks.shared.case import on
from benchmarks.shared.released import NO_DROPOUT, planned_step
from benchmarks.shared.results import Benchmark, Report, known, measure, say
from experiments.command.load import load
from jaxmem._core.actions import ALL
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database
from jaxmem._cost.profile.options import Allowed
from jaxmem._model.states.places import HOST, Places
from jaxmem._planner.placement.front import layer_policy
from jaxmem._planner.placement.layer import RESIDENT, LayerPolicy
from jaxmem._planner.placement.plan import read_places
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, solve_placement
from jaxmem._planner.placement.search import PlacedTrial, PlacementSearch, with_working
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.search.trial import Limits
from jaxmem._planner.sizes import Boundary
from jaxmem._result.plan.rows import Point
from jaxmem._target.compile.backend import DEVICELESS_MARGIN
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem.errors import BudgetError

DEVICES = {"rtx4090": 24 * 10**9, "a100-80gb": 80 * 10**9, "h200": 141 * 10**9}
HOSTS = {"128 GB": 128 * 10**9, "256 GB": 256 * 10**9, "1 TB": 10**12}
RULES = ("joint", "states alone", "activations alone", "nothing moved")
FEW, MOST = 8, 1024  # layers: of the step that the program is asked of, and of those looked among
BYTES = 12  # a parameter's: itself and two moments, in float32
COMMON = [*NO_DROPOUT, "train.batch=4", "plan.budget=none", "optimizer.clip=none"]


@functools.cache
def step_of(layers: int) -> tuple[Any, tuple]:
    """What builds the step, and the shapes of its arguments."""
    return planned_step(load("gpt_10b", [*COMMON, f"model.layers={layers}"]))


def parameters(layers: int) -> int:
    _, (state, _) = step_of(layers)
    return optax.tree.size(state[0])


def read(backend: Backend, limits: Limits) -> tuple[PlacementSearch, LayerPolicy]:
    """The search for a step of few layers, of which others differ in nothing but their number; and
    the policy of a layer that is recomputed.
    """
    actions, _ = allowed_actions(ALL, backend.target)
    search = read_places(*step_of(FEW), backend, limits, Allowed(actions, actions))
    recomputed = layer_policy(search.profile, search.block, {})
    (recomputed,) = with_working([recomputed], search.steps, search.block.name, search.others)
    return search, recomputed


def least(problem: PlacementProblem, layers: int) -> int:
    """Device bytes of the least plan for so many layers, by the program; past all budgets where
    host memory has no room.

    problem: for any number of layers, with any bytes of the device.
    """
    states = dataclasses.replace(problem.states, layers=layers)
    found = solve_placement(dataclasses.replace(problem, states=states), "bytes")
    return 2**62 if found is None else found.device_bytes


def ruled(problem: PlacementProblem, name: str, recomputed: LayerPolicy) -> PlacementProblem:
    """What is asked where only what `name` says is allowed."""
    if name == "joint":
        return problem
    if name == "states alone":
        return dataclasses.replace(problem, policies=[recomputed])
    states = problem.states
    held = dataclasses.replace(states, outside=0, fixed=states.fixed + states.outside)
    problem = dataclasses.replace(problem, places=(RESIDENT,), states=held)
    if name != "nothing moved":
        return problem
    kept = [p for p in problem.policies if not p.host_bytes]
    return dataclasses.replace(problem, policies=kept, outer_moves=False)


@dataclasses.dataclass
class Found:
    """What a search found for a number of layers, and the least bytes, as a plan tells them."""

    search: PlacementSearch
    best: PlacedTrial
    points: tuple[Point, ...]


def least_of(search: PlacementSearch, lowest: PlacementSolution) -> PlacedTrial | None:
    """The least step, compiled; None where it does not fit."""
    predicted = search.expected(lowest)
    step = search.steps.compile_fully(search.assignment(lowest), lowest.places)
    search.error += step.total - predicted
    return PlacedTrial(lowest, predicted, step) if search.limits.allow(step) else None


def boundary_of(
    few: PlacementSearch,
    rule: Callable[[PlacementProblem], PlacementProblem],
    fastest: bool,
    error: int | None,
) -> Boundary:
    """Looks for the number of layers where steps cease to fit.

    rule: makes the problem that is asked.
    fastest: whether the fastest plan is searched for, as users have it; else the least one is
      compiled.
    error: by how many bytes compiled steps took more than their walks; None where none was
      compiled.
    """
    errors, room = [] if error is None else [error], few.limits.usable_bytes

    def found_for(layers: int) -> Any:
        steps = PlacedSteps(*step_of(layers), few.steps.backend)
        problem = rule(dataclasses.replace(few.problem, states=steps.states()))
        error = errors[-1] if errors else 0
        search = dataclasses.replace(few, steps=steps, problem=problem, error=error, trials=[])
        lowest, best = known(search.least()), None
        if not errors or search.expected(lowest) <= room:
            best = search.run() if fastest else least_of(search, lowest)
            errors.append(search.error)
        needed = search.expected(lowest)
        if best is None:
            raise BudgetError(f"{layers} layers do not fit", least_bytes=needed)
        return Found(search, best, (Point(needed, lowest.seconds),))

    predicted = functools.partial(least, rule(few.within(None)))
    return Boundary(range(2, MOST), predicted, room, found_for)


def temporaries(search: PlacementSearch) -> int:
    """Bytes beside the arguments of the step with nothing resident and every layer recomputed, as
    compiled.
    """
    layers = search.problem.states.layers
    assignment = Assignment({**search.others, search.block.name: {}})
    step = search.steps.compile_fully(assignment, Places(layers, 0, outer_moments=HOST))
    return step.total - step.compiled.argument_bytes


def row(few: PlacementSearch, rule: Callable, error: int | None, joint: bool) -> dict[str, Any]:
    """What is found for one GPU, one size of host memory, and one rule."""
    boundary = boundary_of(few, rule, joint, error)
    index = boundary.find()
    found: Any = boundary.plans[index]
    layers, beyond = boundary.sizes[index], boundary.failures.get(index + 1)
    return {
        "layers": layers,
        "parameters": parameters(layers),
        **bytes_of(found.best),
        "walks are off by": found.search.error,
        "a layer more needs": beyond and beyond.least_bytes,
    } | ({"temporaries": temporaries(found.search)} if joint else {})


def limits_of(target: str, host: str, backend: Backend) -> Limits:
    budget = DEVICES[target]
    return Limits(budget, int(budget * (1 - backend.margin)), HOSTS[host])


def run(report: Report, target: str) -> None:
    keys = {(host, name): f"{target}, {host}, {name}" for name in RULES for host in HOSTS}
    if report.has(*keys.values()):
        return
    with on(target, Database()) as backend:
        say(f"{target}: walking through {FEW} layers")
        few, recomputed = read(backend, limits_of(target, "1 TB", backend))
        for (host, name), key in keys.items():
            limits = limits_of(target, host, backend)
            within = dataclasses.replace(few, limits=limits)
            rule = functools.partial(ruled, name=name, recomputed=recomputed)
            of_rule = [report[keys[h, name]] for h in HOSTS if report.has(keys[h, name])]
            error = of_rule[-1]["walks are off by"] if of_rule else None
            # Where all states are on the device, host memory is not what is short.
            if of_rule and 2 * of_rule[0]["host compiled"] <= min(HOSTS.values()):
                report.once(key, lambda first=of_rule[0]: first)
            report.once(key, row, within, rule, error, joint=name == "joint")


def summary(report: Report) -> dict:
    told: dict[str, Any] = {"share": {}, "share of all memory": {}}
    for target, host in itertools.product(DEVICES, HOSTS):
        cell, device = f"{target}, {host}", DEVICES[target]
        row, both = report[f"{cell}, joint"], device + HOSTS[host]
        could = (both - row["temporaries"] - DEVICELESS_MARGIN * device) / BYTES
        told["share"][cell] = row["parameters"] / could
        told["share of all memory"][cell] = BYTES * row["parameters"] / both
    rows = [(key.split(", "), row) for key, row in report.results.items()]
    told["within"] = all(
        r["compiled"] <= DEVICES[t] and r["host compiled"] <= HOSTS[h] for (t, h, _), r in rows
    )
    told["host bytes off by"] = max(abs(r["host predicted"] - r["host compiled"]) for _, r in rows)
    return told


RESULTS = {"largest": Benchmark(DEVICES, run, summary)}


if __name__ == "__main__":
    measure("largest", RESULTS)
