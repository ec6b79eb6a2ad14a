"""verify(): a plan that was loaded, checked against the model at hand and compiled anew."""

import contextlib
import dataclasses

import jax

from jaxmem._core.actions import REST
from jaxmem._core.bytes import show_bytes
from jaxmem._core.groups import ungrouped
from jaxmem._core.profile import BlockClass
from jaxmem._device.target import Target
from jaxmem._plan.plan import Draft, Plan
from jaxmem._planner.compile import Verifier
from jaxmem._planner.microbatches import with_microbatches
from jaxmem._profile.profile import block_classes, fingerprint
from jaxmem._xla.deviceless import Compiler
from jaxmem.errors import BudgetError, PlanFileError


def verify(plan: Plan, build, *args) -> Plan:
    """The plan, with `build(plan)` compiled under it for the plan's own target: `compiled_bytes`
    and `step` are new.

    For a plan that was loaded. Raises PlanFileError, naming the field, if it was made for another
    model or other shapes, and BudgetError if the step no longer compiles within the plan's budget.
    """
    target = Target.parse(plan.target)
    with contextlib.nullcontext() if target.local else Compiler(target) as compiler:
        verifier = Verifier(with_microbatches(build, plan.microbatches), args, target, compiler)
        blocks = block_classes(verifier.trace(Draft()).jaxpr)
        _check_model(plan, blocks)
        compiled = verifier.compile(plan.actions)[0]
    total = compiled.compiled.total_bytes
    if total > plan.budget_bytes:
        raise BudgetError(
            f"verify: the step compiles to {show_bytes(total)} under this plan, over its budget of"
            f" {show_bytes(plan.budget_bytes)}; the plan was made with jax {plan.jax_version}, this"
            f" is {jax.__version__}: plan anew",
            least_bytes=total,
        )
    host = compiled.compiled.host_bytes
    return dataclasses.replace(
        plan, compiled_bytes=total, host_bytes=host, _step=compiled.executable
    )


def _check_model(plan: Plan, blocks: list[BlockClass]) -> None:
    def fail(field: str, got, expected: str):
        raise PlanFileError(
            f"verify: the plan is for another model: its `{field}` is {got}, {expected}; plan this"
            " model anew"
        )

    tags: dict[str, set[str]] = {}
    stacked = {block.name for block in blocks if block.stacked}
    for block in blocks:
        tags.setdefault(block.name, set()).update(t.name for t in block.tags)
    for label, choices in plan.actions.items():
        block = ungrouped(label)
        if block not in tags:
            fail(
                f"actions.{label}",
                "a block",
                f"and the model's blocks are {', '.join(sorted(tags))}",
            )
        if block != label and block not in stacked:
            fail(
                f"actions.{label}",
                "a group of layers",
                "and the model's layers are in no jaxmem.stack",
            )
        for name in choices.keys() - tags[block] - {REST}:
            fail(
                f"actions.{label}.{name}",
                "a tag",
                f"and the model's tags there are {', '.join(sorted(tags[block]))}",
            )
    if plan.fingerprint != (found := fingerprint(blocks)):
        fail(
            "fingerprint",
            plan.fingerprint,
            f"and the model's is {found}: it has other layers, shapes, dtypes or tags",
        )
