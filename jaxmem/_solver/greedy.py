"""The baseline planner: from all tags kept, the switch that frees most bytes a second, again and
again.
"""

import math
import time

from jaxmem._core.actions import KEEP, Actions, Choice
from jaxmem._core.profile import Profile
from jaxmem._solver.check import check_limits, check_profile
from jaxmem._solver.solve import Allowed, Solution, Transients, fits, open_choices, priced


def greedy(
    profile: Profile,
    *,
    room: int | None,
    transients: Transients | None = None,
    host_room: int | None = None,
    allowed: Allowed | None = None,
) -> Solution | None:
    """An assignment that fits, found without looking ahead; None where no single switch frees bytes
    any more.

    Arguments and errors are those of `solve`, which it is compared with. It may miss plans that
    exist.
    """
    transients = transients or {}
    check_profile(profile)
    check_limits(room, host_room, transients)
    started = time.perf_counter()
    choices = open_choices(profile, allowed)
    if not all(choices.values()):
        return None
    actions: Actions = {b.name: {} for b in profile.blocks}
    for (label, tag), open_ in choices.items():
        actions[label][tag] = KEEP if KEEP in open_ else open_[0]
    now = priced(profile, actions, transients)
    while not fits(now, room, None):
        best = None
        for (label, tag), open_ in choices.items():
            for choice in open_:
                other = _switched(actions, label, tag, choice)
                then = priced(profile, other, transients)
                freed, costs = now.bytes - then.bytes, then.seconds - now.seconds
                if freed <= 0 or (host_room is not None and then.host_bytes > host_room):
                    continue
                rank = (freed / costs if costs > 0 else math.inf, freed)
                if best is None or rank > best[0]:
                    best = rank, other, then
        if best is None:
            return None
        _, actions, now = best
    if not fits(now, room, host_room):
        return None
    return Solution(now.actions, now.cost, now.transient_bytes, time.perf_counter() - started)


def _switched(actions: Actions, label: str, tag: str, choice: Choice) -> Actions:
    return actions | {label: actions[label] | {tag: choice}}
