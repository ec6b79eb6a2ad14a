"""The policies for the tensors of one layer that are on the Pareto front of device bytes, host
bytes and seconds.
"""

import dataclasses

from jaxmem._core.actions import KEEP, UNTAGGED, Choice
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.placement.layer import LayerPolicy
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes, solve

SOLVES = 6  # intervals between the least and the most bytes; the solver is run for each boundary
# The number of policies that remain. Most of them offload nothing, and leave the link to states.
MOST_ON_DEVICE, MOST_OFFLOADED = 5, 3


def front(profile: Profile, block: BlockClass) -> tuple[LayerPolicy, ...]:
    """The policies for the layers of `block`, first the policies that offload nothing, then the
    others, each by rising device bytes. Everything recomputed and everything kept are among them,
    unless other policies dominate them.

    Raises SolverError as `solve` does.
    """
    alone = dataclasses.replace(profile, blocks=(block,))
    candidates: list[dict[str, Choice]] = [{}, {UNTAGGED: KEEP}]
    # Without offload, and with offload: offloaded tensors compete with states for the link.
    for host_room in (0, None):
        problem = ActionProblem(alone, None, host_room, time_limit=10.0)
        least, fastest = least_bytes(problem), solve(problem)
        if least is None or fastest is None:
            continue
        candidates += [least.actions[block.name], fastest.actions[block.name]]
        for i in range(1, SOLVES):
            room = least.bytes + (fastest.bytes - least.bytes) * i // SOLVES
            if (between := solve(problem.within(room))) is not None:
                candidates.append(between.actions[block.name])
    policies = undominated([layer_policy(alone, block, choices) for choices in candidates])
    here = thinned([p for p in policies if not p.host_bytes], MOST_ON_DEVICE)
    return here + thinned([p for p in policies if p.host_bytes], MOST_OFFLOADED)


def layer_policy(profile: Profile, block: BlockClass, choices) -> LayerPolicy:
    """The policy with these choices for one layer of the block. Of the seconds of keeping, the
    writes in the forward and the reads in each backward are equal shares.
    """
    alone = dataclasses.replace(profile, blocks=(block,))
    cost = evaluate(alone, {block.name: choices}).blocks[0]
    n = block.backwards
    keep = cost.keep_seconds / (1 + n)
    return LayerPolicy(
        choices=dict(choices),
        device_bytes=cost.device_bytes,
        host_bytes=cost.host_bytes,
        forward_seconds=block.forward_seconds + keep,
        backward_seconds=(block.backward_seconds + cost.recompute_seconds) / n + keep,
        backwards=n,
        doubt_seconds=cost.doubt_seconds,
    )


def undominated(policies: list[LayerPolicy]) -> list[LayerPolicy]:
    """The policies that no other policy dominates, by rising device bytes. Among equal policies,
    the first one remains.
    """
    key = lambda p: (p.device_bytes, p.host_bytes, p.seconds + p.doubt_seconds)
    beats = lambda a, b: all(x <= y for x, y in zip(key(a), key(b)))
    first = [p for i, p in enumerate(policies) if all(key(p) != key(o) for o in policies[:i])]
    return sorted((p for p in first if not any(beats(o, p) for o in first if o is not p)), key=key)


def thinned(policies: list[LayerPolicy], most: int) -> tuple[LayerPolicy, ...]:
    """At most `most` policies, evenly spaced, with the first and the last one."""
    if len(policies) <= most:
        return tuple(policies)
    return tuple(policies[round(i * (len(policies) - 1) / (most - 1))] for i in range(most))
