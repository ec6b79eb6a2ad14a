"""How many layers are of which kind, by a mixed-integer program of counts.

Where states are stored is decided by counts of kinds of layers. A kind is a place for a layer's
states and a way of the layer's tensors. The order of the layers is free, so that a count for each
kind is enough. The size of the program does not grow with the layers, and the program is exact in
the layers. ProTrain (§4) searches four such counts; here one program decides them together with the
actions of single tensors.

Ways are assignments of one layer, solved for by the program of tags. A way remains if no other way
beats it in device bytes, host bytes and time (`front.py`).

The seconds of a kind are the longest of its lanes (compute, the two ways of the link, collectives),
since a layer is copied while the layer before it computes. Seconds that nothing overlaps are added
(`lanes.py`). So the sum over layers is linear. The prototype compared whole passes, in which
resident layers hide the copies of other layers. A loop that prefetches one layer cannot do that.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import pulp

from jaxmem._model.states.places import DEVICE, HOST, Places
from jaxmem._planner.placement.lanes import Link, fetched_first, lanes_of
from jaxmem._planner.placement.layer import (
    BUFFERED,
    COPIED,
    PLACES,
    RESIDENT,
    STREAMED,
    LayerGroup,
    LayerPolicy,
    States,
)
from jaxmem._planner.placement.sharding import ONE_DEVICE, Sharding
from jaxmem._planner.solve.solve import solved
from jaxmem._result.plan.timeline import PlacedLayers

MOST_KINDS = 3  # of layers in one step: each is a loop of its own
UNIT = 1e6  # bytes and microseconds: sums of some thousands, which HiGHS's tolerances are made for
TIE = 1e-9  # seconds that a megabyte is worth: it only breaks ties


@dataclasses.dataclass(frozen=True)
class PlacementProblem:
    """What is asked for.

    states: what the stack's states take.
    ways: those that a layer may go, with their working memory.
    link: the line to the host.
    microbatches: of a step.
    room: bytes of the device for everything; None for no limit.
    host_room: bytes of host memory; None for no limit.
    short: bytes by which sums are known to be too small.
    places: those allowed.
    kinds: how many kinds of layers there may be.
    sharding: how the step is divided over devices.
    outer_moves: whether the moments outside the layers may lie in host memory.
    """

    states: States
    ways: Sequence[LayerPolicy]
    link: Link
    microbatches: int = 1
    room: int | None = None
    host_room: int | None = None
    short: int = 0
    places: tuple[str, ...] = PLACES
    kinds: int = MOST_KINDS
    sharding: Sharding = ONE_DEVICE
    outer_moves: bool = True

    @property
    def all_kinds(self) -> list[LayerGroup]:
        return [LayerGroup(place, w) for place in self.places for w in range(len(self.ways))]

    def device(self, kind: LayerGroup) -> int:
        """Bytes that a layer of the kind adds to the device."""
        return self.states.on_device(kind.place) + self.ways[kind.way].device_bytes

    def host(self, kind: LayerGroup) -> int:
        """Bytes that it adds to host memory."""
        return self.states.on_host(kind.place) + self.ways[kind.way].host_bytes

    def working(self, kind: LayerGroup) -> int:
        """Working memory of a step that has a layer of the kind."""
        return self.ways[kind.way].working[kind.place != RESIDENT]

    def lanes(self, kind: LayerGroup) -> PlacedLayers:
        """The lanes of one layer of the kind."""
        return lanes_of(self.ways[kind.way], kind.place, self.states, self.link, self.sharding)

    def seconds(self, kind: LayerGroup) -> float:
        """Seconds that a layer of the kind takes in a step."""
        return self.lanes(kind).seconds(self.microbatches)

    def cautious(self, kind: LayerGroup) -> float:
        """What layers are ranked by: seconds, and the doubt of what loses accuracy."""
        return self.seconds(kind) + self.microbatches * self.ways[kind.way].doubt_seconds

    @property
    def outer_seconds(self) -> float:
        """Seconds to fetch the moments outside the layers, and to store them."""
        link = self.link
        return self.states.outside * (1 / link.to_device + 1 / link.to_host) * self.microbatches

    @property
    def alone_seconds(self) -> float:
        """Seconds in which something crosses between devices beside no layer, in any answer."""
        return self.sharding.alone(self.states, self.microbatches)


@dataclasses.dataclass(frozen=True)
class PlacementSolution:
    """How many layers are of which kind.

    counts: by kind, those that are there, in the order of the layers.
    outer: the memory of the moments outside the layers.
    device_bytes: of the whole step, by the question's sums.
    host_bytes: in host memory.
    seconds: of the layers in a step, and of what is fetched beside no work.
    cautious_seconds: what answers are ranked by: seconds, and the doubt of what loses accuracy.
    solve_seconds: what solving took.
    """

    counts: Mapping[LayerGroup, int]
    outer: str
    device_bytes: int
    host_bytes: int
    seconds: float
    cautious_seconds: float
    solve_seconds: float

    @property
    def places(self) -> Places:
        of = lambda place: sum(n for kind, n in self.counts.items() if kind.place == place)
        layers = sum(self.counts.values())
        return Places(layers, of(RESIDENT), of(COPIED), of(BUFFERED), self.outer)

    @property
    def ways(self) -> list[tuple[int, int, int]]:
        """The groups of layers that go one way, in order: the first, the one after the last, and
        the way's number.
        """
        found: list[tuple[int, int, int]] = []
        start = 0
        for kind, n in self.counts.items():
            if found and found[-1][2] == kind.way:
                found[-1] = (found[-1][0], start + n, kind.way)
            else:
                found.append((start, start + n, kind.way))
            start += n
        return found


def answer(question: PlacementProblem, goal: str = "time") -> PlacementSolution | None:
    """The counts of least time that fit, or of least device bytes where `goal` is "bytes"; None
    where none fit.

    Raises SolverError where the solver ends without an answer.
    """
    start = time.perf_counter()
    states, kinds = question.states, question.all_kinds
    problem, count = pulp.LpProblem("counts", pulp.LpMinimize), [0]

    def variable(high, category):
        count[0] += 1
        return problem.add_variable(f"v{count[0]}", 0, high, cat=category)

    n = {k: variable(states.layers, pulp.LpInteger) for k in kinds}
    used = {k: variable(1, pulp.LpBinary) for k in kinds}
    # No binary one, of which the solver's interface sets both bounds.
    outer = variable(1 if states.outside and question.outer_moves else 0, pulp.LpInteger)
    working, streams = variable(None, pulp.LpContinuous), variable(1, pulp.LpBinary)
    problem += pulp.lpSum(n.values()) == states.layers
    problem += pulp.lpSum(used.values()) <= question.kinds
    for k in kinds:
        problem += n[k] <= states.layers * used[k]
        # XLA takes a loop of one turn apart: it reads such a layer by a kernel of its own, and
        # fuses it with what stands beside it.
        if states.layers > 1:
            problem += n[k] >= 2 * used[k]
        if k.place in (STREAMED, BUFFERED):
            problem += used[k] <= streams
        problem += working >= used[k] * (question.working(k) / UNIT)
    sums = lambda of: pulp.lpSum(n[k] * (of(k) / UNIT) for k in kinds)
    fixed = states.fixed + states.outside + question.short
    device = sums(question.device) + working - outer * (states.outside / UNIT) + fixed / UNIT
    if question.room is not None:
        problem += device <= question.room / UNIT
    if question.host_room is not None:
        host = sums(question.host) + outer * (states.outside / UNIT)
        problem += host <= question.host_room / UNIT
    first = fetched_first([STREAMED], states, question.link)
    seconds = pulp.lpSum(n[k] * (question.cautious(k) * UNIT) for k in kinds)
    seconds += outer * (question.outer_seconds * UNIT) + streams * (first * UNIT)
    problem += seconds + device * (TIE * UNIT) if goal == "time" else device + seconds * TIE
    if not solved(problem):
        return None
    whole = {k: round(v.varValue or 0) for k, v in n.items()}
    chosen = {k: c for k, c in _ordered(question, whole).items() if c}
    return priced(
        question,
        chosen,
        HOST if (outer.varValue or 0) > 0.5 else DEVICE,
        time.perf_counter() - start,
    )


def priced(
    question: PlacementProblem,
    counts: Mapping[LayerGroup, int],
    outer: str,
    solve_seconds: float = 0.0,
) -> PlacementSolution:
    """What counts take, by the question's sums, whether they fit or not."""
    states = question.states
    hosted = states.outside if outer == HOST else 0
    device = sum(n * question.device(k) for k, n in counts.items())
    device += max(question.working(k) for k in counts)
    device += states.fixed + states.outside - hosted + question.short
    host = sum(n * question.host(k) for k, n in counts.items()) + hosted
    beside = fetched_first([k.place for k in counts], states, question.link)
    beside += question.alone_seconds + (question.outer_seconds if hosted else 0.0)
    seconds = beside + sum(n * question.seconds(k) for k, n in counts.items())
    cautious = beside + sum(n * question.cautious(k) for k, n in counts.items())
    return PlacementSolution(counts, outer, device, host, seconds, cautious, solve_seconds)


def _ordered(question: PlacementProblem, counts: Mapping[LayerGroup, int]) -> dict[LayerGroup, int]:
    """Kinds in the order of the layers: by place, and of one place those that save least first."""
    order = {place: i for i, place in enumerate(PLACES)}
    key = lambda k: (order[k.place], question.ways[k.way].device_bytes)
    return {k: counts[k] for k in sorted(counts, key=key)}
