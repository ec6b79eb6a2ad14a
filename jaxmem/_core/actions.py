"""What may become of a tagged tensor: actions, and choices of an action with its codec."""

import dataclasses
import enum
from collections.abc import Mapping


class Action(enum.StrEnum):
    """The treatment of a tagged tensor between its forward and its backward.

    KEEP leaves the tensor in device memory. RECOMPUTE computes the tensor again in the backward.
    COMPRESS stores codes of the tensor in device memory. OFFLOAD stores the tensor in host memory.
    COMPRESS_OFFLOAD stores codes of the tensor in host memory.

    An action is a strategy: the rest of jaxmem reads its properties, and compares no member. The
    arrays that an action stores are defined in `_model/tags/storage.py`, and the letter, words and
    colours of an action in `_result/action_styles.py`.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    COMPRESS_OFFLOAD = "compress_offload"

    @property
    def stores(self) -> bool:
        """Whether the forward stores arrays for the backward."""
        return self is not Action.RECOMPUTE

    @property
    def names_codec(self) -> bool:
        """Whether a choice of the action names a codec."""
        return self in (Action.COMPRESS, Action.COMPRESS_OFFLOAD)

    @property
    def encodes(self) -> bool:
        """Whether the backward reads decoded values, which may differ from the forward's values."""
        return self.names_codec

    @property
    def offloads(self) -> bool:
        """Whether the action stores data in host memory."""
        return self in (Action.OFFLOAD, Action.COMPRESS_OFFLOAD)


ALL = tuple(Action)
"""All actions, including the actions that use a codec."""
LOSSLESS = tuple(action for action in Action if not action.encodes)
"""The actions that encode nothing: the backward reads the exact values of the forward."""


@dataclasses.dataclass(frozen=True, order=True)
class Choice:
    """An action for one tensor, and a codec if the action compresses.

    action: the action, or its name.
    codec: the codec, or its text form, which `jaxmem.codecs.parse` reads; the text is stored. None
      if the action does not compress.

    Raises ValueError for an unknown action, for an action that compresses without a codec, and for
    a codec with another action.
    """

    action: Action
    codec: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "action", Action(self.action))
        object.__setattr__(self, "codec", self.codec and str(self.codec))
        if self.action.names_codec != (self.codec is not None):
            raise ValueError(
                f"Choice: action {self.action.value!r} with codec {self.codec!r}; a codec goes with"
                " compress actions, and only with them"
            )

    def __str__(self) -> str:
        return self.action.value if self.codec is None else f"{self.action.value} {self.codec}"


# The choices that JAX's own policies have too. Without a checkpoint, every tensor is kept; under a
# checkpoint, a tensor that an assignment does not name is recomputed.
KEEP = Choice(Action.KEEP)
RECOMPUTE = Choice(Action.RECOMPUTE)
OFFLOAD = Choice(Action.OFFLOAD)


# Block label -> tag name -> choice. A tag that is absent is recomputed. The name UNTAGGED stands
# for all tensors of the block that no tag names. If UNTAGGED is kept, the block has no checkpoint,
# and every tag is kept too. If UNTAGGED is absent, untagged tensors are recomputed.
Actions = dict[str, dict[str, Choice]]
UNTAGGED = "*"

# Decides no block: the step runs as its author wrote it, with the checkpoints of its own.
AS_WRITTEN: Actions = {}
EVERYTHING_KEPT = "everything kept"  # the name, for users, of the step that plans are compared with


def is_whole(choices: Mapping[str, Choice]) -> bool:
    """Whether a block with these choices has no checkpoint, so that every tensor is kept."""
    return choices.get(UNTAGGED) == KEEP


def choice_of(choices: Mapping[str, Choice], tag: str) -> Choice:
    """The choice that a tag has in a block with these choices."""
    return KEEP if is_whole(choices) else choices.get(tag, RECOMPUTE)


def stored(actions: Actions) -> Actions:
    """The choices that store something: two assignments are the same if these are."""
    return {
        label: {tag: choice for tag, choice in tags.items() if choice.action.stores}
        for label, tags in actions.items()
    }
