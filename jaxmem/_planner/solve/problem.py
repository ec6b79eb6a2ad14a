"""The question to the solver: a profile, and the limits that an assignment must meet.

The solver is given one `Problem`. Before, the available bytes of the device and of the host,
working memory and refused choices were passed separately through nineteen signatures, and placed
states would have added to each signature.
"""

import dataclasses
from collections.abc import Mapping

from jaxmem._core.actions import RECOMPUTE, Actions, Choice
from jaxmem._core.profile import Profile

Key = tuple[str, str, Choice]  # block, tag, choice


@dataclasses.dataclass(frozen=True)
class Problem:
    """A profile and limits. Bytes are of all layers together, on one device.

    profile: the step.
    room: bytes for what is saved and for working memory beyond the model's reference: the budget
      less arguments and less that reference. None means no limit.
    host_room: bytes for what is moved to host memory. None means no limit.
    working: by (block, tag, choice), the working memory that the choice adds to the reference.
    corrections: by (block, tag, choice), the seconds that the choice adds to the step beyond what
      the profile says; may be negative. The program reckons with them, and a solution's price,
      which is the profile's, does not.
    refused: choices that may not be taken, RECOMPUTE among them if asked.
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
    excluded: tuple[Actions, ...] = ()
    time_limit: float = 60.0

    def within(self, room: int | None) -> "Problem":
        """The same with another `room`."""
        return dataclasses.replace(self, room=room)

    def without(self, block: str, tag: str, choice: Choice) -> "Problem":
        """The same with one choice refused."""
        return dataclasses.replace(self, refused=self.refused | {(block, tag, choice)})

    def lossless(self) -> "Problem":
        """The same with every choice refused that loses accuracy without need."""
        lossy = {
            (block.name, tag.name, option.choice)
            for block in self.profile.blocks
            for tag in block.tags
            for option in tag.options
            if option.lossy
        }
        return dataclasses.replace(self, refused=self.refused | lossy)

    def open_choices(self) -> dict[tuple[str, str], tuple[Choice, ...]]:
        """Maps (block, tag) to the choices that have a price at every place of that name, in every
        class of that label, RECOMPUTE first.

        Those that are refused are left out, so that a tag may have none.
        """
        found: dict[tuple[str, str], tuple[Choice, ...]] = {}
        for block in self.profile.blocks:
            for tag in block.tags:
                known = (RECOMPUTE, *(o.choice for o in tag.options if o.choice != RECOMPUTE))
                key = (block.name, tag.name)
                found[key] = tuple(c for c in found.get(key, known) if c in known)
        return {
            key: tuple(c for c in choices if (*key, c) not in self.refused)
            for key, choices in found.items()
        }
