"""A block's graph reduced for the solver: which recomputations and inputs are needed, as a
function of the tags' choices.

Between tags nothing is decided: what is demanded of an untagged equation follows from which tags
after it are recomputed. So the whole graph contracts to its tags, and each cost is attached to the
set of tags that cause it.
"""

import dataclasses
from collections import defaultdict

from jaxmem._core.profile import BlockClass, Tag
from jaxmem._planner.solve.cost import tag_at

# When something is demanded: if any of these tags, by position in `Demand.tags`, is demanded and
# recomputed.
When = frozenset[int]
# The backward itself reads it, whatever the tags' choices. No tag has the position -1.
ALWAYS: When = frozenset({-1})


@dataclasses.dataclass(frozen=True)
class Demand:
    """A block class as the solver sees it; bytes and seconds are those of one layer.

    Equations that are always demanded together share one entry, so a chain or a whole operator
    costs one term.

    tags: each tag with when it is demanded. A tag comes after those that may pass demand on to it.
    recompute_seconds: what repeating the equations takes that are demanded then.
    input_bytes, input_seconds: of the block's inputs that are read raw then.
    """

    tags: tuple[tuple[Tag, When], ...]
    recompute_seconds: dict[When, float]
    input_bytes: dict[When, int]
    input_seconds: dict[When, float]


def demand_of(block: BlockClass) -> Demand:
    """Reduces a block's graph by one estimate from its last equation to its first."""
    free = set(block.free)
    demanders: dict[int, set[int]] = defaultdict(set)  # value -> who demands it, as in a When
    for v in block.needed:
        demanders[v] |= ALWAYS
    tags: list[tuple[Tag, When]] = []
    recompute: dict[When, float] = defaultdict(float)
    for equation in reversed(block.equations):
        when = _when(demanders[o] for o in equation.outputs if o not in free)
        if not when:
            continue
        tag = tag_at(block, equation)
        if tag is not None:
            tags.append((tag, when))
            # What lies before the tag is demanded for its sake only if the tag is recomputed. All
            # that demands the tag is thereby replaced by the tag's own position.
            when = frozenset({len(tags) - 1})
        elif equation.tag is None:
            recompute[when] += equation.seconds
        for v in equation.inputs:
            demanders[v] |= when
    sizes: dict[When, int] = defaultdict(int)
    keeping: dict[When, float] = defaultdict(float)
    seconds = block.input_seconds or (0.0,) * len(block.inputs)
    for v, s in zip(block.inputs, seconds):
        if v not in free and (when := _when([demanders[v]])):
            sizes[when] += block.values[v]
            keeping[when] += s
    return Demand(tuple(tags), dict(recompute), dict(sizes), dict(keeping))


def _when(demanders) -> When:
    """The union of several demands. ALWAYS absorbs the others, so that equal cases have one key."""
    union = frozenset().union(*demanders)
    return ALWAYS if union >= ALWAYS else union
