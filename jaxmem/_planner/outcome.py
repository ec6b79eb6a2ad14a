"""What a search ends with: a Plan with its table, or the error that names the least bytes and what
holds them.
"""

import dataclasses

import jax

from jaxmem._core.actions import RECOMPUTE, Actions
from jaxmem._core.bytes import show_bytes
from jaxmem._core.profile import Profile
from jaxmem._device.target import Target
from jaxmem._plan.plan import Bytes, Plan
from jaxmem._planner.divide import Division
from jaxmem._planner.pareto import curve
from jaxmem._planner.table import rows
from jaxmem._planner.trials import Evidence, Tried
from jaxmem.errors import BudgetError

ADVICE = {
    "arguments and model states": "use a smaller model, lower-precision states, or more devices",
    "tensors saved for the backward": "allow more actions, or tag more tensors",
    "working memory of the head and one block": "chunk the loss, or use a smaller batch: no action"
    " in a block makes it smaller",
}


@dataclasses.dataclass(frozen=True)
class Spent:
    """What a search took. Seconds are of waiting."""

    profile_seconds: float
    solve_seconds: float
    compile_seconds: float
    compiles: int


def outcome(
    evidence: Evidence,
    best: Tried,
    division: Division | None,
    target: Target,
    spent: Spent,
    notes: tuple[str, ...],
) -> Plan:
    """The plan that `best` is, of layers that are divided or not."""
    profile, baseline = evidence.profile, evidence.baseline
    base, ideal = _step_seconds(profile, baseline, target), baseline.cost.seconds
    seconds = lambda more: (
        base + max(0.0, more - ideal)
    )  # never claimed to be faster than the step without a plan
    decided = division.profile if division else profile
    actions: Actions = {b.name: dict(best.actions.get(b.name, {})) for b in decided.blocks}
    for block in decided.blocks:
        for tag in block.tags:
            actions[block.name].setdefault(tag.name, RECOMPUTE)
    model = evidence.model()
    room = evidence.room - evidence.static - int(model.reference)
    return Plan(
        actions=actions,
        budget_bytes=evidence.limit,
        predicted_bytes=best.predicted_bytes,
        compiled_bytes=best.total,
        baseline_bytes=baseline.total,
        host_bytes=best.host_bytes,
        predicted_seconds=seconds(best.cost.seconds),
        baseline_seconds=base,
        profile_seconds=spent.profile_seconds,
        solve_seconds=spent.solve_seconds,
        compile_seconds=spent.compile_seconds,
        compiles=spent.compiles,
        time_source=profile.time_source,
        target=str(target),
        fingerprint=profile.fingerprint,
        jax_version=jax.__version__,
        parts=_parts(evidence, best),
        baseline_parts=_parts(evidence, baseline),
        rows=rows(
            decided,
            actions,
            room,
            division.transients if division else model.transients,
            evidence.host_room,
        ),
        points=curve(
            profile,
            model.transients,
            evidence.host_room,
            lambda size: evidence.static + int(model.reference) + size,
            seconds,
            baseline.total,
        ),
        notes=notes,
        _step=best.verified.executable,
    )


def infeasible(evidence: Evidence, target: Target) -> BudgetError:
    """Names the least that compiled, and the largest of its parts."""
    least = min(evidence.tried, key=lambda t: t.total)
    parts = dict(zip(ADVICE, dataclasses.astuple(_parts(evidence, least))))
    holder = max(parts, key=lambda k: parts[k])
    margin = 1 - evidence.room / evidence.limit
    return BudgetError(
        f"plan: `budget` is {show_bytes(evidence.limit)}, and the least that compiled is"
        f" {show_bytes(least.total)}"
        f" ({least.total} bytes) for target {str(target)!r}: "
        + ", ".join(f"{show_bytes(v)} {k}" for k, v in parts.items())
        + f"; the largest part is {holder}: {ADVICE[holder]}"
        + (
            f"; {margin:.0%} of the budget is left for autotuning on the device"
            if margin > 1e-3
            else ""
        )
        + (f"; host memory needed: {show_bytes(least.host_bytes)}" if least.host_bytes else ""),
        least_bytes=least.total,
    )


def _parts(evidence: Evidence, tried: Tried) -> Bytes:
    return Bytes(evidence.static, tried.cost.saved_bytes, tried.working)


def _step_seconds(profile: Profile, baseline: Tried, target: Target) -> float:
    """A step with everything kept: the blocks, the other products at the rate of theirs, the states
    read and written.
    """
    products = [
        (e.flops, e.seconds)
        for b in profile.blocks
        for e in b.equations
        if e.matmuls and e.seconds > 0
    ]
    rate = (
        sum(f for f, _ in products) / sum(s for _, s in products)
        if products
        else target.matmul_flops
    )
    others = baseline.verified.compiled.matmul_flops - sum(b.runs * b.flops for b in profile.blocks)
    states = 2 * baseline.verified.compiled.argument_bytes / target.bandwidth
    return profile.step_seconds + max(0.0, others) / rate + states
