"""What a target can carry out, and hold."""

from collections.abc import Sequence

from jaxmem._core.actions import ALL, LOSSLESS, Action
from jaxmem._core.bytes import show_bytes
from jaxmem._core.versions import installed, release
from jaxmem._device.target import Target
from jaxmem.errors import TagError, TargetError

OFFLOAD_SINCE = (0, 11, 1)


def allowed_actions(
    actions: Sequence[Action], target: Target
) -> tuple[tuple[Action, ...], tuple[str, ...]]:
    """The actions to plan with, and what to tell the user of those left out.

    Left out, or `jaxmem.plans.LOSSLESS`, they leave out what the target cannot do; an action asked
    for by name that it cannot do is a TargetError, an unknown one a TagError.
    """
    try:
        wanted = tuple(Action(a) for a in ([actions] if isinstance(actions, str) else actions))
    except ValueError as error:
        raise TagError(
            f"plan: `actions` is {actions!r}: {error}; expected some of {', '.join(Action)}"
        ) from None
    obstacle = offload_obstacle(target)
    if obstacle is None or not any(a.offloads for a in wanted):
        return wanted, ()
    if actions is not ALL and actions is not LOSSLESS:
        raise TargetError(
            f"plan: `actions` asks for offload on target {target.name!r}, where {obstacle}; leave"
            " it out, or leave `actions` out"
        )
    return tuple(a for a in wanted if not a.offloads), (f"offload is left out: {obstacle}",)


def budget_notes(limit: int, target: Target) -> tuple[str, ...]:
    """What to tell the user of a budget of `limit` bytes that the target's memory does not have."""
    if limit <= target.usable_bytes:
        return ()
    where = "on this machine" if target.local else f"on {target.name!r}"
    return (
        f"the budget is {show_bytes(limit)}, and a program {where} can use"
        f" {show_bytes(target.usable_bytes)}: a plan that takes more cannot run there",
    )


def offload_obstacle(target: Target) -> str | None:
    """Why `target` cannot offload, or None."""
    if target.platform == "cpu":
        return "a CPU has no host memory apart from its own"
    version = installed("jaxlib") or "0"
    if release(version) < OFFLOAD_SINCE:
        return (
            f"jaxlib {version} reads offloaded tensors of a scan at wrong offsets (fixed in 0.11.1)"
        )
    return None
