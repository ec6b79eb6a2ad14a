"""estimate(): what an assignment that was written by hand would take, without a compile."""

import dataclasses

import jax

from jaxmem._core.actions import keeps_everything
from jaxmem._core.assignment import Assignment, Decisions
from jaxmem._device.target import Target
from jaxmem._jax.step import trace
from jaxmem._liveness.walk import temporary_bytes
from jaxmem._planner.by_hand import read_by_hand
from jaxmem._solver.cost import everything
from jaxmem._xla.backend import backend_for


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step is expected to take under an assignment. Bytes are those of one device.

    bytes: of the step: its arguments, results and temporaries at their peak.
    baseline_bytes: of the step with everything kept.
    saved_bytes: what the blocks save for the backward, which is exact.
    arguments_bytes: of its arguments, which is exact.
    seconds_more: by how much it takes longer than with everything kept; below 0 where it is faster.
    time_source: where the times of pieces come from: "measured", "xla" or "roofline".
    """

    bytes: int
    baseline_bytes: int
    saved_bytes: int
    arguments_bytes: int
    seconds_more: float
    time_source: str


def estimate(build, assignment: Decisions, *args, target: str | Target = "local") -> Estimate:
    """Returns what the step would take under an assignment written by hand, without compiling it.

    build, args, target: as for `jaxmem.plan`.
    assignment: as for `jaxmem.plans.price`, which compiles the step and tells its true bytes.

    Bytes are from a walk through the traced step, which fuses and orders operations as XLA is
    expected to: an estimate, and neither an upper bound nor a lower one. Seconds are the cost
    model's, from pieces that are measured, or estimated by XLA, where they are not known yet.

    Raises TagError, StepError and TargetError as `jaxmem.plans.price`.
    """
    target = Target.parse(target)
    on_gpu = target.platform == "cuda"
    with backend_for(target) as backend:
        by_hand = read_by_hand(build, assignment, args, backend, "estimate")

    def expected(decisions: Decisions | None) -> int:
        traced = trace(build, decisions, args)[1]
        donated = [i for i, a in enumerate(jax.tree.leaves(traced.args_info)) if a.donated]
        beside = temporary_bytes(traced.jaxpr, donated, on_gpu=on_gpu, shards=by_hand.step.shards)
        return by_hand.step.arguments + beside

    idle = {label: {} for label in by_hand.whole.idle_blocks}
    kept = keeps_everything(by_hand.actions)
    return Estimate(
        bytes=expected(None if kept else Assignment(idle | by_hand.actions)),
        baseline_bytes=expected(None),
        saved_bytes=by_hand.cost.saved_bytes,
        arguments_bytes=by_hand.step.arguments,
        seconds_more=by_hand.cost.seconds - everything(by_hand.whole).seconds,
        time_source=by_hand.whole.time_source,
    )
