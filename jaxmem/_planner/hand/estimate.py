"""estimate(): bytes and seconds of an assignment written by hand, without a full compile."""

import dataclasses

from jaxmem._core.assignment import Decisions, leaves_as_written
from jaxmem._planner.hand.read import read_by_hand
from jaxmem._planner.search.estimates import Estimates
from jaxmem._planner.solve.cost import everything
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem.errors import TagError


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated bytes and time of a step under an assignment, on one device.

    bytes: bytes of the step at its peak: arguments, results and temporaries.
    baseline_bytes: bytes of the step with everything kept.
    saved_bytes: bytes that the blocks save for the backward. This number is exact.
    arguments_bytes: bytes of the step's arguments. This number is exact.
    seconds_more: seconds per step in addition to the step with everything kept. The number is
      negative if the step is faster.
    time_source: the source of the times of pieces: "measured", "xla" or "roofline".
    """

    bytes: int
    baseline_bytes: int
    saved_bytes: int
    arguments_bytes: int
    seconds_more: float
    time_source: str


def estimate(build, assignment: Decisions, *args, target: str | Target = "local") -> Estimate:
    """Estimates the bytes and the time of a step under an assignment, without a full compile.

    build, args, target: as for `jaxmem.plan`.
    assignment: the actions, such as `jaxmem.plans.Assignment({"block": {"up": Choice("keep")}})`,
      or a plan. `jaxmem.plans.price` takes the same assignments, compiles the step, and returns
      compiled bytes.

    The bytes come from a liveness estimate of the traced step, with the fusions and the order of
    operations that XLA is expected to choose. A liveness estimate is neither an upper nor a lower
    bound. For a named TPU, libtpu compiles the step for buffers, and the bytes come from libtpu's
    buffer assignment. The seconds come from the cost model. The cost model adds up times of pieces,
    which jaxmem measures, or takes from XLA's estimates, if they are not stored from an earlier
    plan.

    Raises TagError, StepError and TargetError as `jaxmem.plans.price` does. Raises TagError also
    for an assignment that leaves a step with checkpoints of its own as written, because these
    checkpoints have no price without a compile.
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
        estimates = Estimates(step.steps, whole, step.shards)
        return Estimate(
            bytes=step.arguments + estimates.temporary_bytes(by_hand.actions),
            baseline_bytes=step.arguments + estimates.temporary_bytes(whole.everything_kept),
            saved_bytes=by_hand.cost.saved_bytes,
            arguments_bytes=step.arguments,
            seconds_more=by_hand.cost.seconds - everything(whole).seconds,
            time_source=whole.time_source,
        )
