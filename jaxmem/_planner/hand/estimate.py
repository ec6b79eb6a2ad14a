"""estimate(): what an assignment that was written by hand would take, without a compile."""

import dataclasses

from jaxmem._core.assignment import Decisions, leaves_as_written
from jaxmem._planner.hand.read import read_by_hand
from jaxmem._planner.solve.cost import everything
from jaxmem._planner.trials.walks import Walks
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem.errors import TagError


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
    """Returns what the step would take under an assignment written by hand, without compiling it
    whole.

    build, args, target: as for `jaxmem.plan`.
    assignment: as for `jaxmem.plans.price`, which compiles the step and tells its true bytes.

    Bytes are from a walk through the traced step, which fuses and orders operations as XLA is
    expected to: an estimate, and neither an upper bound nor a lower one. For a TPU they are those
    of the buffers that its compiler assigns, after which it is stopped. Seconds are the cost
    model's, from pieces that are measured, or estimated by XLA, where they are not known yet.

    Raises TagError, StepError and TargetError as `jaxmem.plans.price`.
    """
    target = Target.parse(target)
    with backend_for(target) as backend:
        by_hand = read_by_hand(build, assignment, args, backend, "estimate")
        step, whole = by_hand.step, by_hand.whole
        if leaves_as_written(assignment) and step.written is not None:
            raise TagError(
                "estimate: `assignment` leaves the step as written, whose own checkpoints have no"
                " price without a compile; expected actions for its blocks, or use"
                " jaxmem.plans.price, which compiles it"
            )
        walks = Walks(step.steps, whole, step.shards)
        return Estimate(
            bytes=step.arguments + walks.beside_arguments(by_hand.actions),
            baseline_bytes=step.arguments + walks.beside_arguments(whole.everything_kept),
            saved_bytes=by_hand.cost.saved_bytes,
            arguments_bytes=step.arguments,
            seconds_more=by_hand.cost.seconds - everything(whole).seconds,
            time_source=whole.time_source,
        )
