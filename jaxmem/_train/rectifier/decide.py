"""What speaks for another plan, and against it: numbers of a decision, and the decision itself."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxmem._core.actions import Actions
from jaxmem._core.labels import group_label, ranges, ungrouped
from jaxmem._model.codecs.outlier import OutlierSeparated
from jaxmem._model.codecs.registry import parse
from jaxmem._result.plan.plan import Plan
from jaxmem._train.rectifier.counts import Counts


def rooms(counts: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    """The room that each tag's codec would be given for these counts."""
    of = OutlierSeparated().with_room_for
    return {(b, t): of(n).capacity for b, tags in counts.items() for t, n in tags.items()}


@dataclasses.dataclass(frozen=True)
class Room:
    """A codec's room for outliers in some of a tag's layers, all of which are `layers`."""

    block: str
    tag: str
    capacity: int
    start: int
    stop: int
    layers: int

    def beyond(self, counts: Sequence[int]) -> list[int]:
        """The counts of its layers that are beyond it. Tensors of several microbatches come layer
        by layer, one microbatch after the other.
        """
        of = (n for i, n in enumerate(counts) if self.start <= i % self.layers < self.stop)
        return [n for n in of if n > self.capacity]


def rooms_of(actions: Actions) -> list[Room]:
    """The rooms of an assignment's codecs that separate outliers."""
    found = []
    for label, choices in actions.items():
        block = ungrouped(label)
        groups = dict(
            zip((group_label(block, *g) for g in ranges(actions, block)), ranges(actions, block))
        )
        start, stop = groups.get(label, (0, 1))
        layers = max((end for _, end in groups.values()), default=1)
        for tag, choice in choices.items():
            codec = None if choice.codec is None else parse(choice.codec)
            if isinstance(codec, OutlierSeparated):
                found.append(Room(block, tag, codec.capacity, start, stop, layers))
    return found


def overflows(actions: Actions, several: Sequence[Counts]) -> list[str]:
    """A sentence for each tag whose codec has a smaller capacity than its tensors have outliers."""
    found = {}
    for room in rooms_of(actions):
        beyond = [n for c in several for n in room.beyond(c.get(room.block, {}).get(room.tag, ()))]
        if beyond:
            has = f"{room.block}/{room.tag} has {max(beyond)} outliers"
            found[room.block, room.tag] = f"{has} and room for {room.capacity}"
    return list(found.values())


def without_room(actions: Actions, counts: Counts) -> int:
    """How many outlier channels codecs quantize with the rest, over all tensors."""
    rooms = rooms_of(actions)
    each = ((room, room.beyond(counts.get(room.block, {}).get(room.tag, ()))) for room in rooms)
    return sum(n - room.capacity for room, beyond in each for n in beyond)


def most_gained(plan: Plan) -> float:
    """Seconds a step by which another plan of the same step could be faster at most, as predicted:
    down to the fastest of all bytes.
    """
    fastest = min((p.seconds for p in plan.points), default=plan.baseline_seconds)
    return max(0.0, plan.predicted_seconds - min(fastest, plan.baseline_seconds))


def planning_seconds(plan: Plan) -> float:
    """What making the plan took: what another one may take too."""
    return plan.profile_seconds + plan.solve_seconds + plan.compile_seconds


def changed(actions: Actions, others: Actions) -> dict[str, str]:
    """What other actions do otherwise: block/tag -> "this -> that"."""
    found: dict[str, str] = {}
    for label in sorted({*actions, *others}):
        was, is_now = actions.get(label, {}), others.get(label, {})
        for tag in sorted({*was, *is_now}):
            if was.get(tag) != is_now.get(tag):
                found[f"{label}/{tag}"] = f"{was.get(tag, 'absent')} -> {is_now.get(tag, 'absent')}"
    return found


def identity(plan: Plan) -> list:
    """What tells plans that were asked for apart, as JSON."""
    return [plan.fingerprint, plan.target, plan.budget_bytes, plan.microbatches, plan.batch]
