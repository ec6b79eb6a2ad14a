"""Plans that `jaxmem.jit` made before, from the database.

A plan is stored under the step, traced with every tag recomputed, the shapes and shardings of its
arguments, the options of planning, the device and its usable memory, `XLA_FLAGS`, and the versions
of jaxmem, JAX, jaxlib, Triton and jax-triton. So a later process compiles the plan's step, and
searches nothing. A stored plan that exceeds its budget, or that cannot be read, is made anew.
"""

import functools
import json
from typing import Any

import jax

from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database
from jaxmem._core.progress import LOG
from jaxmem._core.versions import installed
from jaxmem._model.tags.implementation import next_options
from jaxmem._planner.multi_process import by_the_first
from jaxmem._planner.placement.layer import NOTHING
from jaxmem._planner.placement.plan import SHARDING, STATES
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._planner.plan import plan as make_plan
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.history import History
from jaxmem._planner.verify import compiled_under, verify
from jaxmem._result.plan import file
from jaxmem._result.plan.plan import Plan
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.export import AlreadyTraced
from jaxmem.errors import JaxmemError


@by_the_first
def plan_or_recall(build, *args, options: dict[str, Any], changed: dict[str, Any]) -> Plan:
    """The plan that an earlier call made for an equal step and equal options, verified, or a new
    plan, which is stored in its place. Under several processes the first one decides.

    build, args: as for `jaxmem.plan`.
    options: the options of `jaxmem.plan`, for the device at hand. With `fresh` nothing is recalled.
    changed: options in place of the user's, for a step that ran out of memory under its plan.
      Nothing is recalled then, and the new plan is stored under `options`.

    Raises the errors of `jaxmem.plan`.
    """
    anew = bool(changed) or options.get("fresh", False)
    decisive = sorted((name, value) for name, value in options.items() if name != "fresh")
    target, nothing = Target.parse("local"), Assignment.nothing()
    with backend_for(target, Database()) as backend:
        steps = StepCompiler(build, args, backend)
        if SHARDING in options.get("decide", ()):  # the step is traced over its devices
            placed = PlacedSteps(build, args, backend, NOTHING)
            steps = placed.at(placed.resident)
        stage, traced = steps.read(nothing)
        history = History(backend, traced.jaxpr)
        versions = installed("jaxmem"), jax.__version__
        key = repr((decisive, target.usable_bytes, versions, _shardings(args)))
        if not anew and (text := history.recall_plan(key)) is not None:
            try:
                LOG.info("compiling the step under its stored plan")
                plan = file.read(Plan, json.loads(text), "the stored plan")
                places_states = plan.places is not None
                return verify(plan, build, *args) if places_states else compiled_under(plan, steps)
            except (JaxmemError, ValueError) as error:
                LOG.info("the stored plan is made anew: %s", error)
    # A trace with today's checkpoint does not run under the option `jax_remat3`.
    # A released step whose states are placed is traced for other places.
    again = next_options() or STATES in options.get("decide", ())
    is_traced = lambda plan: plan == nothing and not again
    once = lambda plan: AlreadyTraced(stage) if is_traced(plan) else build(plan)
    traced_once = functools.wraps(build)(once)
    made = make_plan.__wrapped__(traced_once, *args, **options | changed)
    history.remember_plan(key, json.dumps(made.to_json()))
    return made


def _shardings(args: tuple) -> list[Any]:
    """The shardings of arrays that are committed to devices."""
    leaves = jax.tree.leaves(args)
    return [str(a.sharding) if getattr(a, "committed", False) else None for a in leaves]
