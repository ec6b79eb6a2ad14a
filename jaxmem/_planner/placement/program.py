"""The mixed-integer program over placements: the number of layers in each group.

The number of layers in each group decides where states are stored. A group is a place for a layer's
states and a policy for the layer's tensors. The order of the layers is free, so that a count for
each group is enough. The size of the program does not grow with the layers, and the program is
exact in the layers. ProTrain (§4) searches four such counts; here one program decides the counts
together with the actions of single tensors.

Policies are assignments of one layer, from the program over actions. A policy remains if no other
policy is better in device bytes, host bytes and time (`front.py`). The blocks outside the stack,
such as the layers of another loop, have one of several whole assignments, on such a front too.

The seconds of a group are the seconds of its longest lane (compute, each direction of the link,
collectives), since a layer is copied while the layer before it computes. Seconds of work that
overlaps with no other work are added (`layer.py`). So the sum over layers is linear. The prototype
compared whole passes, in which resident layers hide the copies of other layers. A loop that
prefetches one layer cannot do that.
"""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence

import pulp

from jaxmem._model.states.places import DEVICE, HOST, Places
from jaxmem._planner.placement.layer import (
    BUFFERED,
    COPIED,
    ONE_DEVICE,
    PLACES,
    RESIDENT,
    STREAMED,
    LayerGroup,
    LayerPolicy,
    Link,
    Sharding,
    States,
    fetched_first,
    lanes_of,
)
from jaxmem._planner.solve.cost import Cost
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import solved
from jaxmem._result.plan.timeline import PlacedLayers

MOST_GROUPS = 3  # the most groups of layers in one step: each group is a separate loop
# Bytes are counted in megabytes, and seconds in microseconds. Sums are then some thousands, which
# suits HiGHS's tolerances.
UNIT = 1e6
TIE = 1e-9  # the weight of a megabyte, in seconds: bytes only break ties
NO_OTHERS = ActionSolution({}, Cost(0, 0, 0.0, 0.0, 0.0, ()), 0)  # without blocks outside the stack


@dataclasses.dataclass(frozen=True)
class PlacementProblem:
    """States, policies and limits. Bytes are of one device.

    states: bytes of the stack's states.
    policies: the policies that a layer may have, with their working memory.
    link: the connection to the host.
    microbatches: the number of microbatches of a step.
    others: the assignments that the blocks outside the stack may have. Their seconds are of a step.
    room: device bytes for the whole step; None means no limit.
    host_room: bytes of host memory; None means no limit.
    short: bytes by which the problem's sums are known to be too small.
    places: the allowed places.
    most_groups: the largest number of groups.
    sharding: how the step is divided over devices.
    outer_moves: whether the moments outside the layers may be in host memory.
    """

    states: States
    policies: Sequence[LayerPolicy]
    link: Link
    microbatches: int = 1
    others: Sequence[ActionSolution] = (NO_OTHERS,)
    room: int | None = None
    host_room: int | None = None
    short: int = 0
    places: tuple[str, ...] = PLACES
    most_groups: int = MOST_GROUPS
    sharding: Sharding = ONE_DEVICE
    outer_moves: bool = True

    @property
    def groups(self) -> list[LayerGroup]:
        """Every group that a layer may be in."""
        return [LayerGroup(place, p) for place in self.places for p in range(len(self.policies))]

    def device(self, group: LayerGroup) -> int:
        """Device bytes that one layer of the group adds."""
        return self.states.on_device(group.place) + self.policies[group.policy].device_bytes

    def host(self, group: LayerGroup) -> int:
        """Host bytes that one layer of the group adds."""
        return self.states.on_host(group.place) + self.policies[group.policy].host_bytes

    def working(self, group: LayerGroup) -> int:
        """Working memory of a step that has a layer of the group."""
        return self.policies[group.policy].working[group.place != RESIDENT]

    def lanes(self, group: LayerGroup) -> PlacedLayers:
        """The lanes of one layer of the group."""
        policy = self.policies[group.policy]
        return lanes_of(policy, group.place, self.states, self.link, self.sharding)

    def seconds(self, group: LayerGroup) -> float:
        """Seconds that one layer of the group takes in a step."""
        return self.lanes(group).seconds(self.microbatches)

    def risk_adjusted(self, group: LayerGroup) -> float:
        """The seconds by which groups are ranked: `seconds`, plus the error bound of a lossy
        policy.
        """
        error = self.policies[group.policy].doubt_seconds
        return self.seconds(group) + self.microbatches * error

    @property
    def fastest_others(self) -> ActionSolution:
        """The fastest assignment of the blocks outside the stack."""
        return min(self.others, key=lambda one: one.risk_adjusted_seconds)

    @property
    def outer_seconds(self) -> float:
        """Seconds to fetch the moments outside the layers, and to store them."""
        link = self.link
        return self.states.outside * (1 / link.to_device + 1 / link.to_host) * self.microbatches

    @property
    def alone_seconds(self) -> float:
        """Seconds of collectives that overlap with no layer, in every solution."""
        return self.sharding.alone(self.states, self.microbatches)


@dataclasses.dataclass(frozen=True)
class PlacementSolution:
    """The number of layers in each group.

    counts: layers by group, without empty groups, in the order of the layers.
    outer: the memory of the moments outside the layers.
    others: the assignment of the blocks outside the stack.
    device_bytes: device bytes of the whole step, by the problem's sums.
    host_bytes: bytes in host memory.
    seconds: seconds of the layers in a step, of transfers that overlap with no work, and of what
      `others` adds to a step that saves for free.
    risk_adjusted_seconds: the seconds by which solutions are ranked: `seconds`, plus the error
      bounds of lossy policies.
    solve_seconds: seconds that the solver took.
    """

    counts: Mapping[LayerGroup, int]
    outer: str
    others: ActionSolution
    device_bytes: int
    host_bytes: int
    seconds: float
    risk_adjusted_seconds: float
    solve_seconds: float

    @staticmethod
    def of(
        problem: PlacementProblem,
        counts: Mapping[LayerGroup, int],
        outer: str,
        others: ActionSolution | None = None,
        solve_seconds: float = 0.0,
    ) -> "PlacementSolution":
        """Returns counts as a solution with the problem's sums, whether or not they are within the
        limits. The blocks outside the stack have the fastest assignment if `others` is None.
        """
        states, others = problem.states, others or problem.fastest_others
        hosted = states.outside if outer == HOST else 0
        device = others.saved_bytes + sum(n * problem.device(g) for g, n in counts.items())
        device += max(problem.working(g) for g in counts)
        device += states.fixed + states.outside - hosted + problem.short
        host = others.host_bytes + sum(n * problem.host(g) for g, n in counts.items()) + hosted
        alone = fetched_first([g.place for g in counts], states, problem.link)
        alone += problem.alone_seconds + (problem.outer_seconds if hosted else 0.0)
        seconds = alone + others.seconds + sum(n * problem.seconds(g) for g, n in counts.items())
        risk_adjusted = alone + others.risk_adjusted_seconds
        risk_adjusted += sum(n * problem.risk_adjusted(g) for g, n in counts.items())
        sums = device, host, seconds, risk_adjusted
        return PlacementSolution(counts, outer, others, *sums, solve_seconds)

    @property
    def places(self) -> Places:
        at = lambda place: sum(n for group, n in self.counts.items() if group.place == place)
        layers = sum(self.counts.values())
        return Places(layers, at(RESIDENT), at(COPIED), at(BUFFERED), self.outer)

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """The ranges of layers with one policy, in order: the first layer, the layer after the
        last, and the index of the policy.
        """
        ranges, start = [], 0
        for policy, run in itertools.groupby(self.counts.items(), lambda item: item[0].policy):
            stop = start + sum(n for _, n in run)
            ranges.append((start, stop, policy))
            start = stop
        return ranges


def solve_placement(problem: PlacementProblem, goal: str = "time") -> PlacementSolution | None:
    """The counts of least time within the limits, or of least device bytes if `goal` is "bytes";
    None if no counts are within the limits.

    Raises SolverError if the solver's time runs out before it finds a solution.
    """
    start = time.perf_counter()
    states, groups = problem.states, problem.groups
    lp, numbers = pulp.LpProblem("counts", pulp.LpMinimize), itertools.count(1)
    variable = lambda high, kind: lp.add_variable(f"v{next(numbers)}", 0, high, cat=kind)
    n = {g: variable(states.layers, pulp.LpInteger) for g in groups}
    used = {g: variable(1, pulp.LpBinary) for g in groups}
    # This is not a binary variable, since PuLP would replace the upper bound 0 of a binary variable
    # by 1.
    outer = variable(1 if states.outside and problem.outer_moves else 0, pulp.LpInteger)
    working, streams = variable(None, pulp.LpContinuous), variable(1, pulp.LpBinary)
    takes = [variable(1, pulp.LpBinary) for _ in problem.others]
    lp += pulp.lpSum(takes) == 1
    lp += pulp.lpSum(n.values()) == states.layers
    lp += pulp.lpSum(used.values()) <= problem.most_groups
    for g in groups:
        lp += n[g] <= states.layers * used[g]
        # XLA unrolls a loop of one iteration: it reads the layer by a separate kernel, and fuses
        # the layer with neighbouring operations.
        if states.layers > 1:
            lp += n[g] >= 2 * used[g]
        if g.place in (STREAMED, BUFFERED):
            lp += used[g] <= streams
        lp += working >= used[g] * (problem.working(g) / UNIT)
    sums = lambda bytes_of: pulp.lpSum(n[g] * (bytes_of(g) / UNIT) for g in groups)
    taken = lambda of: pulp.lpSum(t * of(one) for t, one in zip(takes, problem.others))
    fixed = states.fixed + states.outside + problem.short
    device = sums(problem.device) + working - outer * (states.outside / UNIT) + fixed / UNIT
    device += taken(lambda one: one.saved_bytes / UNIT)
    if problem.room is not None:
        lp += device <= problem.room / UNIT
    if problem.host_room is not None:
        host = sums(problem.host) + taken(lambda one: one.host_bytes / UNIT)
        host += outer * (states.outside / UNIT)
        lp += host <= problem.host_room / UNIT
    first = fetched_first([STREAMED], states, problem.link)
    seconds = pulp.lpSum(n[g] * (problem.risk_adjusted(g) * UNIT) for g in groups)
    seconds += outer * (problem.outer_seconds * UNIT) + streams * (first * UNIT)
    seconds += taken(lambda one: one.risk_adjusted_seconds * UNIT)
    lp += seconds + device * (TIE * UNIT) if goal == "time" else device + seconds * TIE
    if not solved(lp):
        return None
    # The order of the layers: by place, and for each place by rising device bytes.
    key = lambda g: (PLACES.index(g.place), problem.policies[g.policy].device_bytes)
    counts = {g: c for g in sorted(groups, key=key) if (c := round(n[g].varValue or 0))}
    memory = HOST if (outer.varValue or 0) > 0.5 else DEVICE
    others = next(one for t, one in zip(takes, problem.others) if (t.varValue or 0) > 0.5)
    return PlacementSolution.of(problem, counts, memory, others, time.perf_counter() - start)
