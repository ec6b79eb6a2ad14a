"""Says which actions a target can carry out, whether its memory holds a budget, and whether its
programs can read host memory in their loops.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from jaxmem._core.actions import ALL, LOSSLESS, Action
from jaxmem._core.bytes import show_bytes
from jaxmem._core.versions import HOST_OFFSETS_SINCE, installed, release
from jaxmem._target.devices.platforms import OnPlatform
from jaxmem._target.devices.target import Target
from jaxmem.errors import TagError, TargetError

# On a CPU, older releases of jaxlib merge the recomputed values of a checkpoint with the values
# that the forward computed, if no loop is between them: temporaries of six layers were 174 MiB
# recomputed and 184 MiB kept with 0.10.2 and 0.11.0, and 44 MiB with 0.11.1.
# Remove with jaxlib 0.11.0: the constant, and `unrolled_obstacle`.
UNROLLED_SINCE = (0, 11, 1)
# A pass of XLA:GPU that moves a loop's host transfers into neighbouring iterations. gemma3-27b did
# not converge with this pass on 16 B200 (loss 12.8, and 5.7 without the pass).
# Remove with a fix: openxla/xla #37979 and #45393. The pass is off by default.
PIPELINED = "xla_gpu_enable_pipelined_host_offloading"
_NAMED = {"all": ALL, "lossless": LOSSLESS}


def allowed_actions(
    actions: Sequence[Action | str] | str, target: Target
) -> tuple[tuple[Action, ...], tuple[str, ...]]:
    """Returns the actions to plan with, and notes for the user about actions that are left out.

    actions: actions or their names, or a text: "all", "lossless", or names separated by commas.
      Case, spaces around a name, and `-` for `_` do not matter.
    target: actions that the target cannot do are left out of "all" and "lossless"
      (`jaxmem.plans.LOSSLESS`).

    Raises TagError for an unknown action and for no action, and TargetError for an action that was
    requested by name and that the target cannot do.
    """
    # Whether `actions` is a named set. Actions that the target cannot do are then left out, and
    # raise no error. `is` and not `==`, since a user's own tuple of the same actions is not a named
    # set.
    named = actions is ALL or actions is LOSSLESS
    if isinstance(actions, str):
        named = _plain(actions) in _NAMED
        words = _NAMED.get(_plain(actions)) or actions.split(",")
    else:
        words = tuple(actions) if isinstance(actions, Iterable) else (actions,)
    wanted = tuple(dict.fromkeys(_action(word, actions) for word in words))
    if not wanted:
        raise TagError(
            f"plan: `actions` is {actions!r}; expected at least one action, such as 'recompute'"
        )
    obstacle = offload_obstacle(target)
    if obstacle is None or not any(a.offloads for a in wanted):
        return wanted, ()
    if not named:
        raise TargetError(
            f"plan: `actions` asks for offload on target {target.name!r}, where {obstacle}; leave"
            " it out, or leave `actions` out"
        )
    return tuple(a for a in wanted if not a.offloads), (f"offload is left out: {obstacle}",)


def budget_notes(limit: int, target: Target) -> tuple[str, ...]:
    """Returns a note if the target's memory has fewer than a budget's `limit` bytes."""
    if limit <= target.usable_bytes:
        return ()
    where = "on this machine" if target.local else f"on {target.name!r}"
    return (
        f"the budget is {show_bytes(limit)}, and a program {where} can use"
        f" {show_bytes(target.usable_bytes)}: a plan that takes more cannot run there",
    )


def offload_obstacle(target: Target) -> str | None:
    """Returns why `target` cannot offload, or None if it can."""
    if not target.traits.host_is_apart:
        return "a CPU has no host memory apart from its own"
    return host_loop_fault(target)


def host_loop_fault(target: OnPlatform) -> str | None:
    """Returns why loops of a target's programs may transfer wrong values between host memory and
    the device, as a clause with a remedy. None if no such fault is known.
    """
    if target.platform in ("cpu", "tpu"):
        return None
    version = installed("jaxlib") or "0"
    if release(version) < HOST_OFFSETS_SINCE:
        return (
            f"jaxlib {version} reads offloaded tensors of a scan at wrong offsets: update jaxlib to"
            " 0.11.1 or later"
        )
    if pipelines_host_transfers(os.environ):
        return (
            f"XLA_FLAGS sets {PIPELINED}, with which a training run did not converge"
            f" (openxla/xla #37979, #45393): remove it, or set --{PIPELINED}=false"
        )
    return None


def pipelines_host_transfers(environment: Mapping[str, str]) -> bool:
    """Whether XLA_FLAGS switches on the pipelining of host transfers. The last value counts."""
    values = re.findall(rf"--{PIPELINED}(?:=(\w+))?(?!\S)", environment.get("XLA_FLAGS", ""))
    return bool(values) and values[-1].lower() in ("", "true", "1")


def unrolled_obstacle(target: Target) -> str | None:
    """Returns why checkpoints of layers that a Python loop repeats save little on `target`, or None
    if they save as they should.
    """
    version = installed("jaxlib") or "0"
    if target.platform != "cpu" or release(version) >= UNROLLED_SINCE:
        return None
    return f"jaxlib {version} undoes their checkpoints on a CPU (mended in 0.11.1)"


def _action(word, actions) -> Action:
    """The action that `word`, one of `actions`, names. Raises TagError if it names none."""
    try:
        return Action(_plain(word))
    except ValueError:
        near = difflib.get_close_matches(
            _plain(word), [*map(str, Action), *_NAMED], n=1, cutoff=0.6
        )
        alone = _plain(word) in _NAMED  # "all" or "lossless" among other words
        hint = f"; did you mean {near[0]!r}?" if near and not alone else ""
        hint = f"; {_plain(word)!r} stands alone" if alone else hint
        raise TagError(
            f"plan: `actions` is {actions!r}: {word!r} is not a valid Action; expected some of"
            f" {', '.join(Action)} with commas between them, or one of"
            f" {', '.join(map(repr, _NAMED))}{hint}"
        ) from None


def _plain(word) -> str:
    """Returns a word in the spelling of an action: lower case, with underscores."""
    return str(word).strip().lower().replace("-", "_")
