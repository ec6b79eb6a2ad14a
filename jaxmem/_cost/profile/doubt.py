"""The doubt of a lossy choice: the seconds by which the choice must be faster than a lossless
choice to be taken.

A lossy codec must gain a difference that a user would notice, or meet a budget that no lossless
plan meets. The difference must be 2 % of the step beyond the uncertainty of the difference.

The doubt of a lossy choice is its own seconds times the uncertainty of times, plus 2 % of the step.
The share of the step is 0.2 % if `actions=` requests codecs. The mixed-integer program minimises
`risk_adjusted_seconds`, the sum of seconds and doubts. Doubts are constants of the choices, so that
brute force can still check the optimum. The seconds that a user reads contain no doubt. Lossless
codecs have no doubt, and neither have codecs to which `actions=` leaves no alternative.

Before a lossy plan is returned, up to two lossless plans are compiled (`look_for_lossless` in
`_planner/search/search.py`). The prediction that no lossless plan fits may be wrong by the few
bytes that decide it.

The uncertainty of measured times is the median of the spreads of all pieces. The spread of a piece
is how far the median of its runs lay above the least run, since the time of the piece is certain to
lie between the two.
"""

import collections
import dataclasses
from collections.abc import Sequence

from jaxmem._core.profile import BlockClass, Option, Tag
from jaxmem._model.codecs.registry import is_lossless

# The share of a step's time that each lossy tag must gain if the user requested codecs: 25 rounds
# of the result time_rank measure a step's time to about 1 %.
MIN_GAIN_REQUESTED = 0.002
# The share if the user did not request codecs: a gain that a user would notice.
MIN_GAIN_DEFAULT = 0.02


def with_doubts(
    blocks: Sequence[BlockClass], uncertainty: float, step_seconds: float, share=MIN_GAIN_REQUESTED
) -> list[BlockClass]:
    """Returns the classes with the `doubt` of each lossy option: the option's seconds times the
    uncertainty of times, plus a `share` of the step.

    So a plan takes a codec only if the codec gains more than the error of the times. If the allowed
    actions leave out keep and offload, all options of a tag have codecs by explicit request, and
    the options get no doubt.

    blocks: the block classes of the step, with their prices.
    uncertainty: the share by which a piece of work may take longer than its stored time.
    step_seconds: seconds of the step with everything kept.
    """
    runs: collections.Counter[str] = collections.Counter()
    for block in blocks:
        runs[block.name] += block.runs
    found = []
    for block in blocks:
        seen = share * step_seconds / max(1, runs[block.name])
        tags = tuple(_doubted(tag, uncertainty, seen) for tag in block.tags)
        found.append(dataclasses.replace(block, tags=tags))
    return found


def _doubted(tag: Tag, uncertainty: float, seen: float) -> Tag:
    """The tag with the doubts of its options.

    seen: seconds per run of the tag's block below which a difference does not matter.
    """
    if all(o.choice.action.encodes for o in tag.options):
        return tag
    options = (
        dataclasses.replace(o, doubt=uncertainty * o.seconds + seen, lossy=True) if _loses(o) else o
        for o in tag.options
    )
    return dataclasses.replace(tag, options=tuple(options))


def _loses(option: Option) -> bool:
    """Whether the option encodes the tensor, and not by a lossless codec."""
    choice = option.choice
    return choice.action.encodes and not (choice.codec is not None and is_lossless(choice.codec))
