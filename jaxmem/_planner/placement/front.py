"""The ways that one layer's tensors may go, of which none is beaten by another in all that counts:
device bytes, host bytes and seconds.
"""

import dataclasses

from jaxmem._core.actions import KEEP, REST, Actions
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.placement.layer import LayerPolicy
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solve import least_bytes, solve

ROOMS = 6  # between the least and the most bytes, for which the solver is asked
# How many ways stay. What offloads nothing leaves the link to states, and is most of them.
MOST_ON_DEVICE, MOST_OFFLOADED = 5, 3


def front(profile: Profile, block: BlockClass) -> tuple[LayerPolicy, ...]:
    """The ways of the layers of `block`: those that offload nothing by rising device bytes, then
    those that do. Everything recomputed and everything kept are among them, unless others are
    better.

    Raises SolverError as `solve`.
    """
    alone = dataclasses.replace(profile, blocks=(block,))
    found: list[Actions] = [{block.name: {}}, {block.name: {REST: KEEP}}]
    # Without offload, and with it: what crosses the link competes with states there.
    for host_room in (0, None):
        problem = Problem(alone, None, host_room, time_limit=10.0)
        least, fastest = least_bytes(problem), solve(problem)
        if least is None or fastest is None:
            continue
        found += [least.actions, fastest.actions]
        for i in range(1, ROOMS):
            room = least.bytes + (fastest.bytes - least.bytes) * i // ROOMS
            if (between := solve(problem.within(room))) is not None:
                found.append(between.actions)
    ways = undominated([way_of(alone, block, actions[block.name]) for actions in found])
    here = thinned([w for w in ways if not w.host_bytes], MOST_ON_DEVICE)
    return here + thinned([w for w in ways if w.host_bytes], MOST_OFFLOADED)


def way_of(profile: Profile, block: BlockClass, choices) -> LayerPolicy:
    """What one layer of the block takes under these choices. Half of the time of keeping is that
    of writing, in the forward, and half that of reading.
    """
    alone = dataclasses.replace(profile, blocks=(block,))
    cost = evaluate(alone, {block.name: choices}).blocks[0]
    return LayerPolicy(
        choices=dict(choices),
        device_bytes=cost.device_bytes,
        host_bytes=cost.host_bytes,
        forward_seconds=block.forward_seconds + cost.keep_seconds / 2,
        backward_seconds=block.backward_seconds + cost.recompute_seconds + cost.keep_seconds / 2,
        doubt_seconds=cost.doubt_seconds,
    )


def undominated(ways: list[LayerPolicy]) -> list[LayerPolicy]:
    """Those that no other beats, by rising device bytes. Of equal ones the first stays."""
    key = lambda w: (w.device_bytes, w.host_bytes, w.seconds + w.doubt_seconds)
    beats = lambda a, b: all(x <= y for x, y in zip(key(a), key(b)))
    first = [w for i, w in enumerate(ways) if all(key(w) != key(o) for o in ways[:i])]
    return sorted((w for w in first if not any(beats(o, w) for o in first if o is not w)), key=key)


def thinned(ways: list[LayerPolicy], most: int) -> tuple[LayerPolicy, ...]:
    """At most so many of them, evenly, both ends among them."""
    if len(ways) <= most:
        return tuple(ways)
    return tuple(ways[round(i * (len(ways) - 1) / (most - 1))] for i in range(most))
