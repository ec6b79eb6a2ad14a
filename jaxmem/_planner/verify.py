"""verify(): checks a loaded plan against the user's model, and compiles the step under the plan."""

import dataclasses

import jax

from jaxmem._core.actions import AS_WRITTEN, UNTAGGED
from jaxmem._core.assignment import Assignment
from jaxmem._core.bytes import show_bytes
from jaxmem._core.groups import ungrouped
from jaxmem._core.profile import BlockClass
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.blocks.policies import check_plan_is_passed_on
from jaxmem._cost.profile.profile import block_classes
from jaxmem._planner.placement.steps import placed_steps
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._result.plan.plan import Plan, check_fingerprint, check_is_plan, other_model
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.support import host_loop_fault
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import with_microbatches
from jaxmem.errors import BudgetError, TargetError


def verify(plan: Plan, build, *args) -> Plan:
    """Compiles the step under a loaded plan for the plan's target, and checks the plan's budget.

    The returned plan has new values of `compiled_bytes`, `host_bytes`, `compiler_options` and
    `step`.

    plan: a plan from `Plan.load`, or a plan whose step has changed since it was made.
    build, args: as for `jaxmem.plan`. A state in `args` may be stored in any memory; the step is
      compiled for the plan's places.

    Raises PlanFileError if the plan was made for another model or other shapes; the message names
    the field. Raises StepError if `plan` is no plan, and if `build` does not pass its plan to every
    block. Raises BudgetError if the compiled step exceeds the plan's budget. Raises TargetError if
    the plan stores tensors in host memory, and loops may transfer wrong values there.
    """
    check_is_plan("verify", plan=plan)
    build, placed = with_microbatches(build, plan.microbatches), None
    with backend_for(Target.parse(plan.target)) as backend:
        if plan.places is not None:
            placed = placed_steps(plan, build, args, backend, "verify")
        # If a plan places states, its fingerprint is computed from the step with all states on the
        # device.
        steps = placed.at(placed.resident) if placed else StepCompiler(build, args, backend)
        jaxpr = steps.trace(Assignment.nothing()).jaxpr
        check_plan_is_passed_on(jaxpr.jaxpr, steps.trace(Assignment.unchanged()).jaxpr.jaxpr)
        _check_model(plan, block_classes(jaxpr), find_blocks(jaxpr.jaxpr).plain_labels)
        if placed is not None and plan.places is not None:
            steps = placed.at(plan.places)
        verified = compiled_under(plan, steps)
    return verified.with_step(None, placed.split, placed.create) if placed else verified


def compiled_under(plan: Plan, steps: StepCompiler) -> Plan:
    """Compiles the step under a plan that was made for it. Returns and raises as `verify`.

    steps: compiles the step.
    """
    actions = AS_WRITTEN if plan.as_written else plan.actions
    compiled = steps.compile_fully(*steps.compile_buffers(actions)).compiled
    fault = host_loop_fault(Target.parse(plan.target))
    total, host = compiled.total_bytes, compiled.host_bytes
    if host and fault is not None:
        raise TargetError(f"verify: the plan stores tensors in host memory, and {fault}")
    if total > plan.budget_bytes:
        raise BudgetError(
            f"verify: the step compiles to {show_bytes(total)} under this plan, over its budget of"
            f" {show_bytes(plan.budget_bytes)}; the plan was made with jax {plan.jax_version}, this"
            f" is {jax.__version__}: plan anew",
            least_bytes=total,
            least_budget=total,
        )
    verified = dataclasses.replace(
        plan,
        compiled_bytes=total,
        host_bytes=host,
        compiler_options=compiled.options,
    )
    return verified.with_step(compiled.executable)


def _check_model(plan: Plan, blocks: list[BlockClass], idle: set[str]) -> None:
    """Raises PlanFileError if the plan was made for another model.

    The fingerprint is compared last, since the other errors can name the block or the tag that
    differs.

    plan: the loaded plan.
    blocks: the blocks of the user's model.
    idle: labels of blocks through which no gradient runs.
    """

    def fail(field: str, got, expected: str):
        raise other_model("verify", field, got, expected)

    tags: dict[str, set[str]] = {}
    stacked = {block.name for block in blocks if block.divisible}
    for block in blocks:
        tags.setdefault(block.name, set()).update(t.name for t in block.tags)
    for label, choices in plan.actions.items():
        block = ungrouped(label)  # a plan's label may be a group of a block's layers
        if label in idle and block not in tags:
            continue
        if block not in tags:
            known = ", ".join(sorted(tags))
            fail(f"actions.{label}", "a block", f"and the model's blocks are {known}")
        if block != label and block not in stacked:
            why = "and the model's layers are in neither jaxmem.stack nor jaxmem.auto"
            fail(f"actions.{label}", "a group of layers", why)
        for name in choices.keys() - tags[block] - {UNTAGGED}:
            known = ", ".join(sorted(tags[block]))
            fail(f"actions.{label}.{name}", "a tag", f"and the model's tags there are {known}")
    check_fingerprint(plan, plan_fingerprint(blocks), "verify")
