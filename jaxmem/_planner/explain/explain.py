"""`jaxmem.explain`: names the buffers that hold a step's memory, at the peak and over the schedule.

The bytes come from the buffer assignment of the compiled program.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax

from jaxmem._core.actions import Actions
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
from jaxmem._result.memory.explanation import Explanation, Part
from jaxmem._result.plan.plan import Plan, check_fingerprint
from jaxmem._target.buffers.held import Held, Peak
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.protocol import Backend
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import batch_axes
from jaxmem._trace.step import trace, with_microbatches

KEPT = "everything kept"
_ADVICE = {  # for each kind of part, how a sentence names it, and what to do if it holds most
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
    beside: whether to explain the step with everything kept too, if `plan` keeps less. This
      explanation takes a second compile, and is the field `beside` of the first. Its states are on
      the device.

    Returns an explanation: `print` shows it, and `to_json()` returns it as plain data. `parts`
    holds the buffers at the peak. `live` holds the bytes in use over the schedule, or None if XLA
    reports no history. `transfers` holds the host transfers of a GPU's step.

    Raises StepError for a step that cannot be traced or compiled, for a buffer assignment that
    cannot be read, and for a step that is not released although the plan places states. Raises
    PlanFileError for a plan that was made for another model, and TargetError for a target that
    cannot be compiled for.
    """
    target = Target.parse(target)
    build = with_microbatches(build, None if plan is None else plan.microbatches)
    with backend_for(target, workers=1) as backend:
        planned = whole = args
        if plan is not None and plan.places is not None:
            placed = placed_steps(plan, build, args, backend, "explain")
            planned, whole = placed.args_at(plan.places), placed.args_at(placed.resident)
            build = placed.build
        found = trace(build, Assignment.nothing(), planned)[1]  # as `plan` finds blocks
        jaxpr, axes = found.jaxpr, batch_axes(found, planned, target.devices)
        blocks = block_classes(jaxpr, axes) if find_blocks(jaxpr.jaxpr).instances else []
        # Another model's plan would name tags and blocks that this step lacks.
        if plan is not None:
            check_fingerprint(plan, plan_fingerprint(blocks), "explain")

        def of(decided: Decisions, actions: Actions | None, name: str) -> Explanation:
            own = planned if decided is plan else whole
            traced = trace(build, decided, own)[1]
            found = _explained(backend, traced, own, actions, name, blocks)
            if _largest(found.parts)[0] != "untagged":
                return found
            tensors = listed(unnamed(jaxpr, math.prod(axes.values())))
            advice = f"{found.advice}. The largest: {tensors}" if tensors else found.advice
            return dataclasses.replace(found, advice=advice)

        if plan is None or plan.as_written:
            unchanged = Assignment.unchanged()
            as_written = trace(build, unchanged, whole)[1].jaxpr.jaxpr
            own = own_checkpoints(as_written) and not has_policies(as_written)
            found = of(unchanged, None, "as written" if own else KEPT)
        else:
            found = of(plan, plan.actions, KEPT if plan.keeps_everything else "under the plan")
        if beside and plan is not None and found.plan != KEPT:
            found = dataclasses.replace(found, beside=of(Assignment.everything(), None, KEPT))
    return found


def _explained(
    backend: Backend,
    traced: jax.stages.Traced,
    args: tuple,
    actions: Actions | None,
    name: str,
    blocks: Sequence[BlockClass],
) -> Explanation:
    """Compiles a step, and explains it.

    traced, args: the step, as `jaxmem._trace.step.trace` returns it, and its arguments.
    actions: those of its plan; None for a step without one, of which any tensor may be saved.
    name: what it is, beside its plan.
    blocks: those that it has under every plan.
    """
    # What the compiled program holds, and what its blocks should save under the plan.
    compiled, full = backend.explain(traced)
    arguments = Arguments(traced, args)
    full = _with_hosted_arguments(full, arguments)
    decided = as_decided(blocks, actions or ())
    saved, layers = expected(decided, actions), {block.layers for block in decided}
    names = name_saved(elsewhere(full), saved, layers) | name_saved(full, saved, layers)
    sizes = compiled.total_bytes, compiled.host_bytes
    found = _explanation(full, sizes, names, arguments, str(backend.target), name)
    return dataclasses.replace(found, transfers=moved(compiled.transfers, arguments, saved))


def _with_hosted_arguments(full: Peak, arguments: Arguments) -> Peak:
    """The peak with arguments in host memory marked so: a CPU's program does not tell the two
    memories apart.
    """
    held = [
        dataclasses.replace(h, host=True)
        if h.kind == "argument" and arguments.name_of(h.op) in arguments.hosted
        else h
        for h in full.held
    ]
    return dataclasses.replace(full, held=tuple(held))


def _explanation(
    full: Peak,
    sizes: tuple[int, int],
    names: dict[Held, tuple[str, str]],
    arguments: Arguments,
    target: str,
    name: str,
) -> Explanation:
    """Gives every buffer its class, and adds classes up.

    full: what the compiled program holds.
    sizes: its bytes on the device, and in host memory.
    names: kind and part of the buffers that are saved for the backward.
    arguments: names of its arguments and results.
    target, name: what it was compiled for, and what it is, beside its plan.
    """
    # The loops over layers, known by the stacks of saved tensors that they hand on.
    handed_on = [(h, h.handed_on) for h in names]
    handed_on += [(x.held, x.handed_on) for x in full.history.lives if x.held in names]
    layers = {loop for h, loops in handed_on if len(h.shape) > 1 for loop in loops}
    # (kind, part, item, bytes) of each buffer, by whether it is in host memory.
    rows: dict[bool, list[Row]] = {False: [], True: []}
    place = lambda h: _place(h, names, layers, arguments)
    for h in full.held:
        rows[h.host].append((*place(h), h.bytes))
    for host, total in zip((False, True), sizes):
        # So that parts add up to the step's bytes, whatever XLA leaves out of its assignment.
        rest = total - sum(size for *_, size in rows[host])
        if rest > 0:
            rows[host].append(("other", "not in the buffer assignment", "", rest))
        rows[host] = without(rows[host], max(0, -rest))
    parts, host_parts = added_up(rows[False]), added_up(rows[True])
    return Explanation(
        target=target,
        plan=name,
        total_bytes=sizes[0],
        host_bytes=sizes[1],
        peak_at=_where(full, layers),
        parts=parts,
        host_parts=host_parts,
        advice=_advice(parts, sizes[0]),
        live=live(full, sizes[0], place),
    )


def _advice(parts: Iterable[Part], total: int) -> str:
    """A sentence about the kind that holds most of the `total` bytes, and what makes it smaller."""
    kind, size = _largest(parts)
    what, remedy = _ADVICE[kind]
    return (
        f"{what} hold{'' if what.endswith('s') else 's'} most, {show_bytes(size)} or"
        f" {100 * size / total:.0f}%: {remedy}"
    )


def _largest(parts: Iterable[Part]) -> tuple[str, int]:
    """The kind that holds most, and its bytes."""
    kinds: collections.Counter[str] = collections.Counter()
    for part in parts:
        kinds[part.kind] += part.bytes
    ((kind, size),) = kinds.most_common(1)
    return kind, size


def _place(
    h: Held, names: dict[Held, tuple[str, str]], layers: set[str], arguments: Arguments
) -> tuple[str, str, str]:
    """Returns the kind, the part and the item of a buffer, from the surest sign to the least sure.

    JAX writes its transformations into the names of operations: "jvp(" is in a differentiated
    forward, "transpose(" in a backward.

    names: kind and part of the buffers that are saved for the backward.
    layers: the names of the loops over layers.
    """
    what = f"{operation(h)} {show_array(h)}".strip()
    if h.kind == "argument":
        name = arguments.name_of(h.op)
        return "arguments", arguments.part_of(name), f"{name} {show_array(h)}"
    if h.kind == "output":
        return "outputs", "outputs, apart from donated arguments", arguments.output(h.index) or what
    if h.kind == "packing":
        return "packing", "packing: gaps between buffers", "gaps"
    if h in names:
        return (*names[h], what)
    backward = any("transpose(" in op for op in (h.op, *h.sources))
    summed = bool(h.handed_on) and operation(h) == "add"  # gradients, over microbatches
    # A gradient looks like what it will update: a donated argument's shape and dtype.
    if (backward or summed) and (h.dtype, h.shape) in arguments.donated:
        return "gradients", "gradients", show_array(h)
    if layers & {*h.loops}:  # made within a loop that stacks what layers save
        return "layer", f"one layer's working memory, {'backward' if backward else 'forward'}", what
    if backward or "jvp(" in h.op or any("jvp(" in op for op in h.sources):
        return "outside", "outside the layers: embedding, logits, loss", what
    return "other", "outside the gradient: update, masks, constants", what


def _where(full: Peak, layers: set[str]) -> str:
    """Where in the step its peak is, as a phrase; "" where nobody knows."""
    if not full.op:
        return ""
    backward = "transpose(" in full.op
    again = "rematted_computation" in full.op  # so JAX names what a checkpoint computes again
    phase = (
        "recomputing for the backward"
        if again
        else "in the backward"
        if backward
        else "in the forward"
    )
    if not backward and "jvp(" not in full.op:
        return f"outside the gradient, at {full.op.rpartition('/')[2]}"
    place = "of a layer" if layers & set(full.loops) else "outside the layers"
    return f"{phase} {place}, at {full.op.rpartition('/')[2]}"
