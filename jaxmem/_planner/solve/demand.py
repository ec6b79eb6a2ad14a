"""A block's graph reduced for the solver: which recomputations and inputs are needed, as a
function of the tags' choices.

Only tags have choices: whether an untagged equation is demanded follows from which tags after it
are recomputed. So the graph contracts to its tags, and each cost belongs to the set of tags that
cause it.
"""

from collections import defaultdict

from jaxmem._core.profile import BlockClass, Tag
from jaxmem._planner.solve.cost import tag_at

# The condition under which a value is demanded: any of these tags, by position in the list of tags,
# is demanded and recomputed.
When = frozenset[int]
# The condition of a value that the backward reads, whatever the tags' choices. No tag has the
# position -1.
ALWAYS: When = frozenset({-1})


def demand_of(
    block: BlockClass,
) -> tuple[list[tuple[Tag, When]], dict[When, float], dict[When, int], dict[When, float]]:
    """Reduces a block class to its tags, for the solver, in one loop from the last equation of its
    graph to the first. Bytes and seconds are of one layer. Equations that are demanded under the
    same condition share one entry, so that a chain of equations costs one term.

    Returns four values:

    - each tag, with the condition under which it is demanded. A tag is listed after the tags that
      may pass demand on to it.
    - for each condition, the seconds to repeat the equations that are demanded under it
    - for each condition, the bytes of the block's inputs that are read raw under it
    - for each condition, the seconds to keep these inputs
    """
    free = set(block.free)
    # By value, the tags that demand it, as in a When.
    demanders: dict[int, set[int]] = defaultdict(set)
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
            # The tag demands the values before it only if the tag is recomputed. So for these
            # values, the tag's own position replaces the condition of the tag.
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
    return tags, dict(recompute), dict(sizes), dict(keeping)


def _when(demanders) -> When:
    """The union of several conditions. ALWAYS absorbs the other conditions, so that equal
    conditions have one key.
    """
    union = frozenset().union(*demanders)
    return ALWAYS if union >= ALWAYS else union
