"""The input of the solver: a profile, and the limits that an assignment must meet.

The solver takes one `ActionProblem`. Before, the available bytes of the device and of the host,
working memory and refused choices were passed separately through nineteen signatures, and placed
states would have added to each signature.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxmem._core.actions import RECOMPUTE, Actions, Choice
from jaxmem._core.profile import Profile

Key = tuple[str, str, Choice]  # block, tag, choice


def keys_of(actions: Actions) -> Iterator[Key]:
    """The choices of an assignment."""
    return ((b, t, c) for b, tags in actions.items() for t, c in tags.items())


def in_groups(
    by_choice: Mapping[Key, float], groups_of: Mapping[str, list[str]]
) -> dict[Key, float]:
    """Numbers by choice, in which a divided block's number counts for each of its groups.

    groups_of: by the label of each divided block, the labels of its groups of layers.
    """
    return {
        (label, tag, choice): number
        for (block, tag, choice), number in by_choice.items()
        for label in groups_of.get(block, [block])
    }


@dataclasses.dataclass(frozen=True)
class ActionProblem:
    """A profile and limits. Bytes are of all layers together, on one device.

    profile: the profile of the step.
    room: bytes available for saved tensors and for working memory beyond the memory model's
      reference: the budget less the arguments and less the reference. None means no limit.
    host_room: bytes available for tensors in host memory. None means no limit.
    working: by (block, tag, choice), the working memory that the choice adds to the reference.
    corrections: by (block, tag, choice), the seconds that the choice adds to the step in addition
      to the profile's seconds; may be negative. The program adds them to its goal. A solution's
      price leaves them out, since it is the profile's price.
    refused: choices that may not be taken; may contain RECOMPUTE.
    most_seconds: the most risk-adjusted seconds that an assignment may take, without corrections.
      None means no limit. A limit lets the solver stop early where no assignment is fast enough.
    excluded: whole assignments that may not be returned, such as those that compiled and did not
      fit.
    time_limit: seconds for one run of the solver.
    """

    profile: Profile
    room: int | None = None
    host_room: int | None = None
    working: Mapping[Key, float] = dataclasses.field(default_factory=dict)
    corrections: Mapping[Key, float] = dataclasses.field(default_factory=dict)
    refused: frozenset[Key] = frozenset()
    most_seconds: float | None = None
    excluded: tuple[Actions, ...] = ()
    time_limit: float = 60.0

    def within(self, room: int | None) -> "ActionProblem":
        """The problem with another `room`."""
        return dataclasses.replace(self, room=room)

    def without(self, block: str, tag: str, choice: Choice) -> "ActionProblem":
        """The problem with one more refused choice."""
        return dataclasses.replace(self, refused=self.refused | {(block, tag, choice)})

    def lossless(self) -> "ActionProblem":
        """The problem with every lossy choice refused for which a lossless choice is open."""
        lossy = {
            (block.name, tag.name, option.choice)
            for block in self.profile.blocks
            for tag in block.tags
            for option in tag.options
            if option.lossy
        }
        return dataclasses.replace(self, refused=self.refused | lossy)

    def open_choices(self) -> dict[tuple[str, str], tuple[Choice, ...]]:
        """Maps (block, tag) to the choices that have a price at every occurrence of the tag's
        name, in every block class of the block's label, RECOMPUTE first.

        Refused choices are left out, so that a tag may have no choice.
        """
        by_tag: dict[tuple[str, str], tuple[Choice, ...]] = {}
        for block in self.profile.blocks:
            for tag in block.tags:
                choices = (RECOMPUTE, *(o.choice for o in tag.options))
                key = (block.name, tag.name)
                by_tag[key] = tuple(c for c in by_tag.get(key, choices) if c in choices)
        return {
            key: tuple(c for c in choices if (*key, c) not in self.refused)
            for key, choices in by_tag.items()
        }
