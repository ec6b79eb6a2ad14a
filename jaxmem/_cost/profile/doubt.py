"""Weighs lossy codecs: by how much each must be faster than what loses nothing, to be taken."""

import collections
import dataclasses
from collections.abc import Sequence

from jaxmem._core.profile import BlockClass, Option, Tag
from jaxmem._model.codecs.forms import parse

# The share of a step's time that each lossy tag must gain in any case, where the user asked for
# codecs: a step's own time is known to about 1 % after 25 rounds of benchmarks/time_rank.
SEEN = 0.002
# The same where the user asked for nothing: exact gradients are given up for what one would notice.
WORTH = 0.02


def with_doubts(
    blocks: Sequence[BlockClass], uncertainty: float, step_seconds: float, share: float = SEEN
) -> list[BlockClass]:
    """Returns the classes with the `doubt` of each lossy option: its own seconds times their
    uncertainty, and a `share` of the step.

    So a codec is taken only where it gains more than the times are known to. A tag whose every
    stored form is a codec's, because the actions allowed leave out keep and offload, is compressed
    by explicit wish, and its options are not doubted.

    blocks: the step's, with their prices.
    uncertainty: the share by which a piece of work may take longer than its time says.
    step_seconds: those of a step with everything kept.
    """
    runs: collections.Counter[str] = collections.Counter()
    for block in blocks:
        runs[block.name] += block.runs
    return [
        dataclasses.replace(
            b,
            tags=tuple(
                _doubted(tag, uncertainty, share * step_seconds / max(1, runs[b.name]))
                for tag in b.tags
            ),
        )
        for b in blocks
    ]


def _doubted(tag: Tag, uncertainty: float, seen: float) -> Tag:
    """A tag with its options' doubts; `seen` is what is noticed of one run of its block."""
    if all(o.choice.action.compresses for o in tag.options):
        return tag
    options = (
        dataclasses.replace(o, doubt=uncertainty * o.seconds + seen, lossy=True) if _loses(o) else o
        for o in tag.options
    )
    return dataclasses.replace(tag, options=tuple(options))


def _loses(option: Option) -> bool:
    """Whether the backward reads other numbers than the forward made."""
    return option.choice.codec is not None and not parse(option.choice.codec).lossless
