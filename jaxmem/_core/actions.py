"""What may become of a tagged tensor: actions, and choices of an action with its codec."""

import dataclasses
import enum


class Action(enum.StrEnum):
    """The treatment of a tagged tensor between its forward and its backward.

    KEEP leaves the tensor in device memory. RECOMPUTE computes the tensor again in the backward.
    COMPRESS stores codes of the tensor in device memory. OFFLOAD stores the tensor in host memory.
    COMPRESS_OFFLOAD stores codes of the tensor in host memory.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    COMPRESS_OFFLOAD = "compress_offload"

    @property
    def compresses(self) -> bool:
        """Whether the action uses a codec."""
        return self in (Action.COMPRESS, Action.COMPRESS_OFFLOAD)

    @property
    def offloads(self) -> bool:
        """Whether the action stores data in host memory."""
        return self in (Action.OFFLOAD, Action.COMPRESS_OFFLOAD)


ALL = tuple(Action)
"""All actions, including the actions that use a codec."""
LOSSLESS = (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD)
"""The actions without a codec: the backward reads the exact values of the forward."""


@dataclasses.dataclass(frozen=True, order=True)
class Choice:
    """An action for one tensor, and a codec if the action compresses.

    action: the action, or its name.
    codec: the codec in its text form, which `jaxmem.codecs.parse` reads. None if the action does
      not compress.

    Raises ValueError for an unknown action, for an action that compresses without a codec, and for
    a codec with another action.
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


# Block label -> tag name -> choice. A tag that is absent is recomputed. The name REST stands for
# all tensors of the block that no tag names. If REST is kept, the block has no checkpoint, and
# every tag is kept too. If REST is absent, untagged tensors are recomputed.
Actions = dict[str, dict[str, Choice]]
REST = "*"

# Decides no block: the step runs as its author wrote it, with the checkpoints of its own.
AS_WRITTEN: Actions = {}


def stored(actions: Actions) -> Actions:
    """The choices that store something: two assignments are the same if these are."""
    return {
        label: {tag: choice for tag, choice in tags.items() if choice != RECOMPUTE}
        for label, tags in actions.items()
    }


def keeps_everything(actions: Actions) -> bool:
    """Whether every block is as it is without a checkpoint."""
    return bool(actions) and all(choices.get(REST) == KEEP for choices in actions.values())
