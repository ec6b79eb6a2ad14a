"""What may become of a tagged tensor: actions, and choices of an action with its codec."""

import dataclasses
import enum


class Action(enum.StrEnum):
    """What becomes of a tagged tensor between its forward and its backward use.

    KEEP leaves it in device memory, RECOMPUTE makes it again, COMPRESS holds codes of it on the
    device, OFFLOAD holds it in host memory, and COMPRESS_OFFLOAD holds codes of it there.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    COMPRESS_OFFLOAD = "compress_offload"

    @property
    def compresses(self) -> bool:
        return self in (Action.COMPRESS, Action.COMPRESS_OFFLOAD)

    @property
    def offloads(self) -> bool:
        return self in (Action.OFFLOAD, Action.COMPRESS_OFFLOAD)


ALL = tuple(Action)
"""Every action, those that use a codec among them."""
LOSSLESS = (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD)
"""The actions that use no codec: the backward reads the forward's values, kept or made again."""


@dataclasses.dataclass(frozen=True, order=True)
class Choice:
    """What becomes of one tensor: an action and, where the action compresses, a codec.

    action: the action, or its name.
    codec: the codec in its text form, which `jaxmem.codecs.parse` reads; None where nothing is
      compressed.

    Raises ValueError for an unknown action, or if a codec is missing or too many.
    """

    action: Action
    codec: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "action", Action(self.action))
        if self.action.compresses != (self.codec is not None):
            raise ValueError(
                f"Choice: action {self.action.value!r} with codec {self.codec!r}; a codec goes with"
                " compress actions, and only with them"
            )

    def __str__(self) -> str:
        return self.action.value if self.codec is None else f"{self.action.value} {self.codec}"


KEEP = Choice(Action.KEEP)
RECOMPUTE = Choice(Action.RECOMPUTE)
OFFLOAD = Choice(Action.OFFLOAD)


# Block label -> tag name -> choice; a tag that is absent is recomputed. REST stands for what no tag
# names: kept, it makes the block as it is without a checkpoint, every tag kept; else it is
# recomputed.
Actions = dict[str, dict[str, Choice]]
REST = "*"

# Decides no block: the step runs as its author wrote it, with the checkpoints of its own.
AS_WRITTEN: Actions = {}


def keeps_everything(actions: Actions) -> bool:
    """Whether every block is as it is without a checkpoint."""
    return bool(actions) and all(choices.get(REST) == KEEP for choices in actions.values())
