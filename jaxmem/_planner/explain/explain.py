"""`jaxmem.explain`: names the buffers that hold a step's memory, at the peak and over the schedule.

The bytes come from the buffer assignment of the compiled program.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable

from jaxmem._core.actions import EVERYTHING_KEPT
from jaxmem._core.assignment import Assignment, Decisions
from jaxmem._core.bytes import show_bytes
from jaxmem._core.groups import as_decided
from jaxmem._core.profile import BlockClass
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.blocks.policies import has_policies, own_checkpoints
from jaxmem._cost.blocks.unnamed import listed, unnamed
from jaxmem._cost.profile.profile import block_classes
from jaxmem._planner.explain.moved import moved
from jaxmem._planner.explain.names import (
    Arguments,
    Row,
    added_up,
    expected,
    name_saved,
    operation,
    show_array,
    without,
)
from jaxmem._planner.explain.over_time import elsewhere, live
from jaxmem._planner.placement.steps import placed_steps
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._result.memory.explanation import Explanation, Part
from jaxmem._result.plan.plan import Plan, check_fingerprint, check_is_plan
from jaxmem._target.buffers.held_buffers import Held, Peak
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import batch_axes
from jaxmem._trace.step import with_microbatches

# For each kind of part: its name in a sentence, and how to make it smaller if it is the largest.
_ADVICE = {
    "saved": ("tagged tensors", "`jaxmem plan --budget B` recomputes, compresses or offloads them"),
    "untagged": (
        "untagged tensors",
        "a plan under a budget recomputes them; tag those that are dear to recompute, so that it"
        " can keep or compress them",
    ),
    "arguments": (
        "the step's arguments",
        "no tag's action makes them smaller; divide them over devices, use an optimizer with less"
        " state, or have the states of a released step placed: decide=('actions', 'states')",
    ),
    "outputs": (
        "outputs beside the arguments",
        "donate what they replace: jax.jit(step, donate_argnums=...)",
    ),
    "gradients": (
        "gradients",
        "no plan makes them smaller; divide them over devices, or update parameters as their"
        " gradients appear",
    ),
    "layer": (
        "the working memory of one layer",
        "no tag's action makes it smaller; use smaller microbatches, a fused attention, or smaller"
        " checkpointed blocks",
    ),
    "outside": (
        "what stands outside the layers",
        "no tag's action makes it smaller; compute the loss in chunks of the positions, or use"
        " smaller microbatches",
    ),
    "other": ("memory outside the gradient", "look at the operations that are listed there"),
    "packing": (
        "packing",
        "no buffer uses it at the peak: smaller microbatches, or another plan, pack differently",
    ),
}


def explain(
    build,
    *args,
    plan: Plan | None = None,
    target: str | Target = "local",
    beside: bool = False,
) -> Explanation:
    """Names the buffers at a step's peak of memory, and the bytes in use over the step's schedule.

    Arguments are named by path, saved tensors by tag, and temporaries by operation. The step is
    compiled once. A step without blocks is explained too, without tags.

    build: `build(plan)` returns the step, as for `jaxmem.plan`.
    args: the step's arguments: arrays, modules or `jax.ShapeDtypeStruct`s.
    plan: the plan under which the step is explained. None means the step as written. If the plan
      places model states, the state in `args` may be stored in any memory: the step is explained
      with the states at the plan's places.
    target: the device, as for `jaxmem.plan`.
    beside: whether to explain the step with everything kept too, if `plan` keeps less. The second
      explanation takes a second compile, and is the field `beside` of the first explanation. Its
      states are on the device.

    Returns an explanation: `print` shows it, and `to_json()` returns it as plain data. `parts`
    holds the buffers at the peak. `live` holds the bytes in use over the schedule, or None if XLA
    reports no history. `transfers` holds the host transfers of a GPU's step.

    Raises StepError if `plan` is no plan, for a step that cannot be traced or compiled, for a
    buffer assignment that cannot be read, and for a step that is not released although the plan
    places states. Raises PlanFileError for a plan that was made for another model, and TargetError
    for a target that cannot be compiled for.
    """
    if plan is not None:
        check_is_plan("explain", plan=plan)
    target = Target.parse(target)
    build = with_microbatches(build, None if plan is None else plan.microbatches)
    with backend_for(target, workers=1) as backend:
        planned = resident = StepCompiler(build, args, backend)
        if plan is not None and plan.places is not None:
            placed = placed_steps(plan, build, args, backend, "explain")
            planned, resident = placed.at(plan.places), placed.at(placed.resident)
        # Blocks are found in the step with everything recomputed, as in `plan`.
        recomputed = planned.trace(Assignment.nothing())
        jaxpr, axes = recomputed.jaxpr, batch_axes(recomputed, planned.args, target.devices)
        blocks = block_classes(jaxpr, axes) if find_blocks(jaxpr.jaxpr).instances else []
        # Another model's plan would name tags and blocks that this step lacks.
        if plan is not None:
            check_fingerprint(plan, plan_fingerprint(blocks), "explain")

        def explained(decided: Decisions, name: str) -> Explanation:
            step = planned if decided is plan else resident
            explanation = _explained(step, decided, name, blocks)
            if _largest(explanation.parts)[0] != "untagged":
                return explanation
            tensors = listed(unnamed(jaxpr, math.prod(axes.values())))
            advice = explanation.advice + (f". The largest: {tensors}" if tensors else "")
            return dataclasses.replace(explanation, advice=advice)

        if plan is None or plan.as_written:
            unchanged = Assignment.unchanged()
            as_written = resident.trace(unchanged).jaxpr.jaxpr
            is_checkpointed = own_checkpoints(as_written) and not has_policies(as_written)
            explanation = explained(unchanged, "as written" if is_checkpointed else EVERYTHING_KEPT)
        else:
            name = EVERYTHING_KEPT if plan.keeps_everything else "under the plan"
            explanation = explained(plan, name)
        if beside and plan is not None and explanation.plan != EVERYTHING_KEPT:
            kept = explained(Assignment.everything(), EVERYTHING_KEPT)
            explanation = dataclasses.replace(explanation, beside=kept)
    return explanation


def _explained(
    step: StepCompiler, plan: Decisions, name: str, blocks: list[BlockClass]
) -> Explanation:
    """Compiles a step, assigns every buffer to a part, and adds up the bytes of each part.

    step: traces the step.
    plan: the plan of the step. A step under an assignment may save any tensor.
    name: the explanation's name for the plan, such as "as written".
    blocks: the step's blocks, which are the same under every plan.
    """
    # The buffers of the compiled program, and the tensors that its blocks should save under the
    # plan.
    traced, actions = step.stages(plan)[1], plan.actions if isinstance(plan, Plan) else None
    compiled, full = step.backend.explain(traced)
    arguments = Arguments(traced, step.args)
    full = _with_hosted_arguments(full, arguments)
    decided = as_decided(blocks, actions or ())
    saved, counts = expected(decided, actions), {block.layers for block in decided}
    names = name_saved(elsewhere(full), saved, counts) | name_saved(full, saved, counts)
    # The loops over layers are the loops that carry stacks of saved tensors.
    handed_on = [(h, h.handed_on) for h in names]
    handed_on += [(x.held, x.handed_on) for x in full.lives if x.held in names]
    layers = {loop for h, loops in handed_on if len(h.shape) > 1 for loop in loops}
    # (kind, part, item, bytes) of each buffer, by whether the buffer is in host memory.
    rows: dict[bool, list[Row]] = {False: [], True: []}
    describe = lambda h: _describe(h, names, layers, arguments)
    for h in full.held:
        rows[h.host].append((*describe(h), h.bytes))
    for host, total in ((False, compiled.total_bytes), (True, compiled.host_bytes)):
        # Parts must add up to the step's bytes, but XLA leaves bytes out of its buffer assignment.
        rest = total - sum(size for *_, size in rows[host])
        if rest > 0:
            rows[host].append(("other", "not in the buffer assignment", "", rest))
        rows[host] = without(rows[host], max(0, -rest))
    parts, host_parts = added_up(rows[False]), added_up(rows[True])
    return Explanation(
        target=str(step.backend.target),
        plan=name,
        total_bytes=compiled.total_bytes,
        host_bytes=compiled.host_bytes,
        peak_at=_where(full, layers),
        parts=parts,
        host_parts=host_parts,
        advice=_advice(parts, compiled.total_bytes),
        live=live(full, compiled.total_bytes, describe),
        transfers=moved(compiled.transfers, arguments, saved),
    )


def _with_hosted_arguments(full: Peak, arguments: Arguments) -> Peak:
    """The peak with the arguments in host memory marked as host buffers. A program for a CPU does
    not distinguish device memory from host memory.
    """
    hosted = lambda h: h.kind == "argument" and arguments.name_of(h.op) in arguments.hosted
    buffers = (dataclasses.replace(h, host=True) if hosted(h) else h for h in full.held)
    return dataclasses.replace(full, held=tuple(buffers))


def _advice(parts: Iterable[Part], total: int) -> str:
    """A sentence about the largest kind among the `total` bytes, and how to make it smaller."""
    kind, size = _largest(parts)
    subject, remedy = _ADVICE[kind]
    return (
        f"{subject} hold{'' if subject.endswith('s') else 's'} most, {show_bytes(size)} or"
        f" {100 * size / total:.0f}%: {remedy}"
    )


def _largest(parts: Iterable[Part]) -> tuple[str, int]:
    """The kind of part with the most bytes, and its bytes."""
    kinds: collections.Counter[str] = collections.Counter()
    for part in parts:
        kinds[part.kind] += part.bytes
    ((kind, size),) = kinds.most_common(1)
    return kind, size


def _describe(
    h: Held, names: dict[Held, tuple[str, str]], layers: set[str], arguments: Arguments
) -> tuple[str, str, str]:
    """Returns the kind, the part and the item of a buffer. The most reliable evidence is tried
    first.

    JAX writes its transformations into the names of operations: "jvp(" is in the names of a
    differentiated forward, and "transpose(" in the names of a backward.

    names: kind and part of the buffers that are saved for the backward.
    layers: the names of the loops over layers.
    """
    item = f"{operation(h)} {show_array(h)}".strip()
    if h.kind == "argument":
        name = arguments.name_of(h.op)
        return "arguments", arguments.part_of(name), f"{name} {show_array(h)}"
    if h.kind == "output":
        return "outputs", "outputs, apart from donated arguments", arguments.output(h.index) or item
    if h.kind == "packing":
        return "packing", "packing: gaps between buffers", "gaps"
    if h in names:
        return (*names[h], item)
    backward = any("transpose(" in op for op in (h.op, *h.sources))
    summed = bool(h.handed_on) and operation(h) == "add"  # gradients, over microbatches
    # A gradient has the shape and the dtype of the donated argument that it updates.
    if (backward or summed) and (h.dtype, h.shape) in arguments.donated:
        return "gradients", "gradients", show_array(h)
    if layers & {*h.loops}:  # made within a loop that stacks the layers' saved tensors
        return "layer", f"one layer's working memory, {'backward' if backward else 'forward'}", item
    if backward or "jvp(" in h.op or any("jvp(" in op for op in h.sources):
        return "outside", "outside the layers: embedding, logits, loss", item
    return "other", "outside the gradient: update, masks, constants", item


def _where(full: Peak, layers: set[str]) -> str:
    """The phase of the step in which the peak occurs, as a phrase; "" if it is unknown."""
    if not full.op:
        return ""
    backward, at = "transpose(" in full.op, f"at {full.op.rpartition('/')[2]}"
    if not backward and "jvp(" not in full.op:
        return f"outside the gradient, {at}"
    phase = "in the backward" if backward else "in the forward"
    # JAX gives this name to operations that a checkpoint recomputes.
    if "rematted_computation" in full.op:
        phase = "recomputing for the backward"
    where = "of a layer" if layers & set(full.loops) else "outside the layers"
    return f"{phase} {where}, {at}"
