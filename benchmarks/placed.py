"""Plans that place model states in host memory: predicted and compiled bytes, the gain over simpler
rules, ProTrain's choices, and the largest model. No step runs.

    python -m benchmarks.placed [RESULT ...]

`placed`: a GPT and a Llama of 24 layers (width 2048, 8 sequences of 1024 in a microbatch, two of
them), released, with float32 states, planned for three GPUs without hardware, within five budgets
each, from a little more than the least that compiles to the bytes of everything on the device.
`error` is a plan's predicted device bytes, before its compile, against the compiled bytes; `first
error` is the error of the search's first compile. Host bytes are compared exactly. `seconds` are
the layers', as predicted.

`placed_rules`: deciding together against deciding one after the other, and against fixed rules. The
same models, targets and prices, within twelve budgets each, from 5 % above the program's least to
everything on the device; solved alone, without a compile.

- `states first`: the places of states are decided as if every layer were recomputed, then one
  policy for the layers of each place within the remaining bytes.
- `actions first`: the layers' policy is decided as if no state took the link, with all layers
  streamed; then the places of their states.
- `states alone`, `all streamed`, `resident`: every layer recomputed; every layer's states in host
  memory; none there.
- `ProTrain`: a block is kept, recomputed or swapped as a whole, its states stream or stay, and
  buffers keep some (its four numbers, spec P1 to P5).

A cell is the layers' predicted seconds under a rule, divided by their predicted seconds under the
joint solution. `host` is the same budget with half of the host memory that the joint solution
takes: time may not fall by it.

`protrain_table`: what plans choose where ProTrain's authors state their choice (spec P10): two
GPTs, two batches, four GPUs of two kinds. Released steps of AdamA with one microbatch of sequences
of 1024, in bfloat16 with float32 states. The layers' policy, the places of their states, and what
is divided over the four devices, are planned together, and the plan is compiled. A host has 90 GiB
for each of its GPUs. `recomputed` counts layers that recompute all of their tags, `kept` those that
keep everything, and `offloaded` those that move a tensor to the host; `persist` counts layers whose
states stay on the device. `protrain` has ProTrain's four numbers.

`largest`: the largest GPT that one device trains with its host's memory: what do states and
activations in host memory gain, apart and together? Layers of gpt_10b (width 4096, heads of 128, 4
sequences of 1024 in one microbatch, no dropout), released, float32 states and bfloat16 compute, for
three GPUs without hardware, each with three sizes of host memory. Codecs are allowed. The number of
layers is the size that `batch="max"` searches for: the state is a function of the number of layers.
Reported bytes are compiled bytes of the plan. A layer more does not fit, by a liveness estimate of
the least step, corrected by the errors of compiled steps, or as compiled.

- `joint` places states and decides about tensors (`decide=("actions", "states")`).
- `states alone` recomputes every layer, `activations alone` leaves all states on the device, and
  `nothing moved` leaves tensors there too.
- `share` is the joint model's parameters over what device and host could hold at 12 bytes each: all
  of both but the temporaries of the step with nothing resident, as compiled. The joint plan may
  take fewer temporaries, and so reach more.
  `share of all memory` leaves nothing out.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import optax

import jaxmem
from benchmarks.shared.case import on
from benchmarks.shared.released import LONG, MODELS, NO_DROPOUT, OWN, config_of, planned_step
from benchmarks.shared.results import Benchmark, Report, known, measure, timed
from benchmarks.shared.searches import from_to
from experiments.command.load import load
from jaxmem._core.actions import ALL, KEEP, LOSSLESS, OFFLOAD, UNTAGGED, is_whole
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database
from jaxmem._core.groups import group_label
from jaxmem._cost.profile.options import Allowed
from jaxmem._model.states.places import HOST, Places
from jaxmem._planner.placement.front import layer_policy
from jaxmem._planner.placement.layer import BUFFERED, RESIDENT, STREAMED, LayerGroup
from jaxmem._planner.placement.plan import read_places
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution, solve_placement
from jaxmem._planner.placement.search import PlacementSearch, with_working
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.search.trial import Limits
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.support import allowed_actions
from jaxmem._trace.arguments import sized
from jaxmem.errors import BudgetError

MICROBATCHES = 2
CASES = tuple(itertools.product(MODELS, ("h200", "rtx4090", "a100-80gb")))


def lossless_search(model: str, backend: Backend) -> PlacementSearch:
    target = backend.target
    limits = Limits(target.usable_bytes, target.usable_bytes, target.host_bytes)
    actions, _ = allowed_actions(LOSSLESS, target)
    step = planned_step(config_of(model, MICROBATCHES))
    return read_places((*step, backend, limits, Allowed(actions, actions)))


def rooms(search: PlacementSearch, least: float, budgets: int) -> list[int]:
    """Budgets from `least` to everything on the device."""
    most = known(solve_placement(search.within(None))).device_bytes
    return from_to(int(least), min(most, search.limits.usable_bytes), budgets)


# -- placed

COMPILED, LEAST_COMPILED = 5, 1.03  # budgets; of the bytes that the program's least compiles to


def within(unlimited: PlacementSearch, room: int) -> dict[str, Any]:
    """The plan within so many bytes: where it places states, and bytes as predicted and as
    compiled.
    """
    limits = dataclasses.replace(unlimited.limits, usable_bytes=room)
    search = dataclasses.replace(unlimited, limits=limits, trials=[])
    best, first = search.run(), search.trials[0]
    row = {
        "room": room,
        "compiles": len(search.trials),
        "solve seconds": search.solve_seconds,
        "first error": first.predicted_bytes / first.total - 1,
    }
    if best is None:
        return row
    return row | {
        "states": str(best.solution.places),
        "predicted": best.predicted_bytes,
        "compiled": best.total,
        "error": best.predicted_bytes / best.total - 1,
        "host predicted": best.solution.host_bytes,
        "host compiled": best.step.host_bytes,
        "seconds": best.solution.seconds,
    }


def of_plans(report: Report, model: str, target: str) -> None:
    keys = [f"{model}, {target}, {i}" for i in range(COMPILED)]
    if report.has(*keys):
        return
    with on(target, Database()) as backend:
        search = lossless_search(model, backend)
        lowest = known(search.least())
        compiled = search.steps.compile_fully(search.assignment(lowest), lowest.places)
        for key, room in zip(keys, rooms(search, LEAST_COMPILED * compiled.total, COMPILED)):
            report.once(key, within, search, room)


def summary_of_plans(report: Report) -> dict:
    rows = [r for r in report.results.values() if "error" in r]
    exact = sum(r["host predicted"] == r["host compiled"] for r in rows)
    return {"plans": len(rows), "of": len(report.results), "host bytes exact": exact}


# -- placed_rules

SOLVED, LEAST_SOLVED = 12, 1.05  # budgets; of the program's least bytes


def fits(problem: PlacementProblem, one: PlacementSolution) -> bool:
    return one.device_bytes <= known(problem.room) and one.host_bytes <= known(problem.host_room)


def states_first(problem: PlacementProblem) -> PlacementSolution | None:
    first = solve_placement(dataclasses.replace(problem, policies=problem.policies[:1]))
    if first is None:
        return None
    found = []
    for policies in itertools.product(range(len(problem.policies)), repeat=len(first.counts)):
        layers = zip(first.counts.items(), policies)
        counts = {LayerGroup(kind.place, policy): n for (kind, n), policy in layers}
        found.append(PlacementSolution.of(problem, counts, first.outer))
    fitting = (one for one in found if fits(problem, one))
    return min(fitting, key=lambda one: one.risk_adjusted_seconds, default=None)


def actions_first(problem: PlacementProblem) -> PlacementSolution | None:
    streamed = lambda policy: {LayerGroup(STREAMED, policy): problem.states.layers}
    alone = lambda policy: PlacementSolution.of(problem, streamed(policy), "pinned_host")
    policies = [p for i, p in enumerate(problem.policies) if fits(problem, alone(i))]
    if not policies:
        return None
    fastest = min(policies, key=lambda policy: policy.seconds)
    return solve_placement(dataclasses.replace(problem, policies=(fastest,)))


def rules(
    search: PlacementSearch,
) -> dict[str, Callable[[PlacementProblem], PlacementSolution | None]]:
    """What solves a problem by each rule."""
    tags = search.block.tags
    offloaded = {t.name: OFFLOAD for t in tags if any(o.host_bytes for o in t.options)}
    many = tuple(
        layer_policy(search.profile, search.block, choices)
        for choices in ({}, {UNTAGGED: KEEP}, offloaded)
    )
    problem = dataclasses.replace(search.problem, policies=many)
    policies = with_working(problem, search.steps, search.profile)
    only = lambda **some: lambda problem: solve_placement(dataclasses.replace(problem, **some))
    return {
        "states first": states_first,
        "actions first": actions_first,
        "states alone": only(policies=policies[:1]),
        "all streamed": only(places=(STREAMED,)),
        "resident": only(places=(RESIDENT,)),
        "ProTrain": only(policies=policies, places=(RESIDENT, STREAMED, BUFFERED)),
    }


def against_rules(problem: PlacementProblem, simpler: dict[str, Callable]) -> dict:
    """The joint solution, and the seconds of the others over its own."""
    joint = known(solve_placement(problem))
    with_less = solve_placement(dataclasses.replace(problem, host_room=joint.host_bytes // 2))
    ratio = lambda one: None if one is None else one.seconds / joint.seconds
    return {
        "room": problem.room,
        "states": str(joint.places),
        "seconds": joint.seconds,
        "solve seconds": joint.solve_seconds,
        "host": ratio(with_less),
        "rules": {name: ratio(rule(problem)) for name, rule in simpler.items()},
    }


def of_budgets(model: str, target: str) -> dict:
    with on(target, Database()) as backend:
        search = lossless_search(model, backend)
        simpler, problem = rules(search), search.within(None)
        budgets = rooms(search, LEAST_SOLVED * known(search.least()).device_bytes, SOLVED)
        problems = [dataclasses.replace(problem, room=room) for room in budgets]
        return {"budgets": [against_rules(one, simpler) for one in problems]}


def of_rules(rows: list[dict[str, float | None]]) -> dict[str, dict]:
    """By rule: how many times as long it takes as the joint solution, where it finds one."""
    found = {rule: [ratio for row in rows if (ratio := row[rule])] for rule in rows[0]}
    return {
        rule: {
            "found": len(ratios),
            "times as long": statistics.geometric_mean(ratios) if ratios else None,
            "least": min(ratios, default=None),
            "most": max(ratios, default=None),
        }
        for rule, ratios in found.items()
    }


def summary_of_rules(report: Report) -> dict:
    rows = [row for found in report.results.values() for row in found["budgets"]]
    times = [[r["seconds"] for r in found["budgets"]] for found in report.results.values()]
    pairs = [pair for one in times for pair in itertools.pairwise(one)]
    less = [row["host"] for row in rows if row["host"] is not None]
    return {
        "budgets": len(rows),
        "rises with the budget": sum(b > a * (1 + 1e-6) for a, b in pairs),
        "falls with less host memory": sum(ratio < 1 - 1e-6 for ratio in less),
    } | of_rules([row["rules"] for row in rows])


# -- protrain_table

# By row of the paper's table: model, batch, target; blocks that ProTrain checkpoints, of all;
# blocks that it swaps; chunks that persist, of all; buffers.
PROTRAIN = {
    "A, RTX 3090": ("gpt_1b", 8, "rtx3090:4", "0/32, 0, 12/12, 0"),
    "A, A100": ("gpt_1b", 8, "a100-80gb:4", "0/32, 0, 12/12, 0"),
    "B": ("gpt_1b", 64, "rtx3090:4", "24/32, 2, 2/12, 3"),
    "C": ("gpt_1b", 64, "a100-80gb:4", "0/32, 0, 12/12, 0"),
    "D": ("gpt_10b", 8, "rtx3090:4", "48/48, 0, 3/49, 46"),
    "E": ("gpt_10b", 8, "a100-80gb:4", "0/48, 0, 15/49, 3"),
}


def decided(model: str, batch: int, target: str) -> jaxmem.Plan:
    size = f"train.batch={batch}", "train.microbatches=1"
    build, args = planned_step(load(model, [*OWN, *NO_DROPOUT, *LONG, *size]), axis="data")
    decide = "actions", "states", "sharding"
    return jaxmem.plan(build, *args, target=target, host_budget="90GiB", decide=decide)


def counts(plan: jaxmem.Plan) -> dict[str, int]:
    """How many layers do what."""
    groups = {group_label("block", a, b): b - a for a, b in plan.groups("block")}
    found = {"recomputed": 0, "kept": 0, "offloaded": 0}
    for label, layers in (groups or {"block": known(plan.places).layers}).items():
        choices = plan.actions[label]
        actions = [c.action for tag, c in choices.items() if tag != UNTAGGED]
        found["recomputed"] += layers * (not any(a.stores for a in actions))
        found["kept"] += layers * is_whole(choices)
        found["offloaded"] += layers * any(a.offloads for a in actions)
    return found


def choices(name: str) -> dict:
    model, batch, target, protrain = PROTRAIN[name]
    found: dict[str, Any] = {"model": model, "batch": batch, "target": target}
    try:
        plan, seconds = timed(decided, model, batch, target)
    except BudgetError as error:
        return found | {"error": str(error)}
    places = known(plan.places)
    found |= {"protrain": protrain, "layers": places.layers} | counts(plan)
    found |= {name: getattr(places, name) for name in ("persist", "copies", "buffers", "streamed")}
    found |= {"divided": plan.divided, "compiled": plan.compiled_bytes, "host": plan.host_bytes}
    found |= {"seconds": plan.predicted_seconds, "compiles": plan.compiles}
    return found | {"planned in seconds": seconds}


# -- largest

DEVICES = {"rtx4090": 24 * 10**9, "a100-80gb": 80 * 10**9, "h200": 141 * 10**9}
HOSTS = {"128 GB": 128 * 10**9, "256 GB": 256 * 10**9, "1 TB": 10**12}
RULES = {  # what plans decide
    "joint": {"decide": ("actions", "states"), "actions": ALL},
    "states alone": {"decide": ("actions", "states"), "actions": ("recompute",)},
    "activations alone": {"actions": ALL},
    "nothing moved": {"actions": [a for a in ALL if not a.offloads]},
}
LAYERS = range(2, 1024)
BYTES = 12  # a parameter's: itself and two moments, in float32


def layers_of(moments: str = "float") -> tuple[Any, tuple]:
    """What `jaxmem.plan` takes: `build`, and the arguments' shapes. The state is a function of the
    number of layers.
    """
    own = *NO_DROPOUT, "train.batch=4", *OWN, f"optimizer.moments={moments}"
    config = load("gpt_10b", own)
    build, (_, batch) = planned_step(config)

    def state(layers: int):
        model = config.model.model_copy(update={"layers": layers})
        return planned_step(config.model_copy(update={"model": model}))[1][0]

    return build, (state, batch)


def plan_within(target: str, host: str, rule: str, step: tuple, **given) -> jaxmem.Plan:
    """The plan of a step for one GPU and one size of host memory, by one rule."""
    build, args = step
    memory = {"budget": DEVICES[target], "host_budget": HOSTS[host]}
    return jaxmem.plan(build, *args, target=target, **memory, **RULES[rule], **given)


def temporaries(target: str, layers: int) -> int:
    """Compiled bytes, without the arguments, of the step with all states streamed and every layer
    recomputed.
    """
    build, args = layers_of()
    places = Places(layers, 0, outer_moments=HOST)
    with on(target, Database()) as backend:
        steps = PlacedSteps(build, sized(args, layers), backend)
        step = steps.compile_fully(Assignment.nothing(), places)
    return step.total - step.compiled.argument_bytes


def largest(target: str, host: str, rule: str, moments: str = "float") -> dict[str, Any]:
    """What is found for one GPU, one size of host memory, and one rule."""
    step = layers_of(moments)
    plan = plan_within(target, host, rule, step, batch="max", sizes=LAYERS)
    layers = known(plan.batch)
    found = {
        "layers": layers,
        "parameters": optax.tree.size(step[1][0](layers)[0]),
        "states": str(plan.places or "on the device"),
        "predicted": plan.predicted_bytes,
        "compiled": plan.compiled_bytes,
        "host compiled": plan.host_bytes,
    }
    return found | ({"temporaries": temporaries(target, layers)} if rule == "joint" else {})


def summary_of_sizes(report: Report) -> dict:
    told: dict[str, Any] = {"share": {}, "share of all memory": {}}
    for target, host in itertools.product(DEVICES, HOSTS):
        cell, both = f"{target}, {host}", DEVICES[target] + HOSTS[host]
        row = report[f"{cell}, joint"]
        told["share"][cell] = BYTES * row["parameters"] / (both - row["temporaries"])
        told["share of all memory"][cell] = BYTES * row["parameters"] / both
    rows = [(key.split(", "), row) for key, row in report.results.items()]
    told["within"] = all(
        r["compiled"] <= DEVICES[t] and r["host compiled"] <= HOSTS[h] for (t, h, _), r in rows
    )
    return told


RESULTS = {
    "placed": Benchmark(CASES, of_plans, summary_of_plans),
    "placed_rules": Benchmark(CASES, row=of_budgets, summary=summary_of_rules),
    "protrain_table": Benchmark(
        PROTRAIN, row=choices, summary=lambda report: {"rows": len(report.results)}
    ),
    "largest": Benchmark(
        itertools.product(DEVICES, HOSTS, RULES), row=largest, summary=summary_of_sizes
    ),
}

if __name__ == "__main__":
    measure("placed", RESULTS)
