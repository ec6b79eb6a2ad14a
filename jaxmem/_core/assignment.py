"""The protocol of an object that is given as `plan`: the choices for the tags of each block, and
the groups of layers that are decided separately.

A plan is any object with two methods, `choices_for(block)` and `groups(block)`. `remat_policy` and
`stack` call nothing else. So an assignment written by hand, a loaded plan and a draft of a search
have the same meaning in both.

A block that a plan does not name is an error. The alternative is to recompute such a block; a
misspelt label would then recompute in silence. A plan therefore also names the blocks that no
gradient runs through.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jaxmem._core.actions import KEEP, UNTAGGED, Action, Choice
from jaxmem._core.groups import group_label, ranges, ungrouped
from jaxmem.errors import TagError

# How a released step stores the moments of its optimizer.
FLOAT, INT8 = MOMENTS = ("float", "int8")


@runtime_checkable
class Decisions(Protocol):
    """The methods of an object that is given as `plan`.

    None is allowed too, and means no plan: `jaxmem.auto` returns the step as its author wrote it,
    and `jaxmem.remat_policy` and `jaxmem.stack` keep every tensor of their blocks.

    An object may also have `as_written`: whether `jaxmem.auto` leaves the step as its author wrote
    it; and `moments`: how `jaxmem.released_step` stores the moments of its optimizer.
    `jaxmem.plans.Plan` and `jaxmem.plans.Assignment` have both methods and both attributes.
    """

    def choices_for(self, block: str) -> Mapping[str, Choice]:
        """Tag name -> choice, for the block of this label.

        A tag that is absent is recomputed. Raises TagError for a block that was not decided.
        """
        ...

    def groups(self, block: str) -> tuple[tuple[int, ...], ...]:
        """The groups of the block's layers with separate decisions, in order: (start, stop), or
        (start, stop, span) for layers in spans.

        The choices of a group have the label `block[start:stop]`, or `block[start:stop:span]`. The
        result is empty if all layers share the choices of the block.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Actions for the tags of each block, without the predictions and measurements of a plan.

    `jaxmem.auto`, `jaxmem.remat_policy`, `jaxmem.stack` and `build` accept an assignment in place
    of a plan:

        Assignment({"block": {"up": Choice("keep"), "probs": Choice("compress", "bit_mask()")}})

    actions: block label -> tag name -> `Choice`, or the name of an action without a codec. A tag
      that is absent is recomputed. The tag "*" stands for all untagged tensors: if "*" is kept, the
      block runs without a checkpoint. A label may name a group of layers, such as `block[0:6]`, or
      layers in spans, such as `block[0:96:8]`: only the input of every eighth layer is saved
      through the step, and the backward of a span of eight layers runs them forward again first.
    others: tag name -> choice, for every block that `actions` does not name. With None, a block
      that `actions` does not name is an error.
    as_written: whether `jaxmem.auto` leaves the step or the loss as its author wrote it, with its
      own checkpoints. Blocks under `jaxmem.remat_policy` follow `actions` and `others` in any case.
    moments: "float" or "int8": how `jaxmem.released_step` stores the moments of its optimizer.
      "float" stores them as the optimizer does, and "int8" stores them in 8 bits.

    Raises TagError for an argument of another form.
    """

    actions: Mapping[str, Mapping[str, Choice]] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Choice] | None = None
    as_written: bool = False
    moments: str = FLOAT

    def __post_init__(self):
        if self.moments not in MOMENTS:
            raise TagError(
                f"Assignment: `moments` is {self.moments!r}; expected one of"
                f" {', '.join(map(repr, MOMENTS))}"
            )
        if not isinstance(self.actions, Mapping):
            raise TagError(f"Assignment: `actions` is {self.actions!r}; {_EXPECTED}")
        # A frozen dataclass is changed through `object`, here once before anyone sees it.
        checked = {label: _checked(label, choices) for label, choices in self.actions.items()}
        object.__setattr__(self, "actions", checked)
        if self.others is not None:
            object.__setattr__(self, "others", _checked("others", self.others))

    @staticmethod
    def everything() -> "Assignment":
        """Returns the assignment that keeps everything: every block runs without a checkpoint.

        Under this assignment, `jaxmem.auto` removes the step's own checkpoints.
        """
        return Assignment(others={UNTAGGED: KEEP})

    @staticmethod
    def unchanged() -> "Assignment":
        """Returns the assignment that leaves the step as its author wrote it, like `plan=None`.

        Blocks under `jaxmem.remat_policy` keep everything.
        """
        return Assignment(others={UNTAGGED: KEEP}, as_written=True)

    @staticmethod
    def nothing() -> "Assignment":
        """Returns the assignment that recomputes every tag, as plain `jax.checkpoint` does."""
        return Assignment(others={})

    def choices_for(self, block: str) -> dict[str, Choice]:
        """Returns the choices for the tags of one block: tag name -> choice.

        block: the label of the block.

        Raises TagError for a block that the assignment does not decide.
        """
        return choices_of(self.actions, block, self.others, "assignment")

    def groups(self, block: str) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of layers with separate decisions, in order, as (start, stop), or as
        (start, stop, span) for layers in spans.

        block: the label of the block.

        The result is empty if all layers of the block share one decision.
        """
        return ranges(self.actions, block)


def in_8_bits(plan: Any) -> Any:
    """Returns an assignment with the decisions of `plan` whose moments are stored in 8 bits. A plan
    whose moments are in 8 bits is returned as it is, and None stands for `Assignment.unchanged()`.
    """
    if moments_of(plan) == INT8:
        return plan
    return dataclasses.replace(Assignment.unchanged() if plan is None else plan, moments=INT8)


def moments_of(plan: Any) -> str:
    """How a released step stores the moments of its optimizer under `plan`, which may be None."""
    return getattr(plan, "moments", FLOAT)


def leaves_as_written(plan: Any) -> bool:
    """Whether `jaxmem.auto` makes no block under this plan."""
    return plan is None or bool(getattr(plan, "as_written", False))


def choices_of(
    actions: Mapping[str, Mapping[str, Choice]],
    block: str,
    others: Mapping[str, Choice] | None,
    what: str,
) -> dict[str, Choice]:
    """The choices of one block, as a new dict. Raises TagError if the block has none: a misspelt
    label would otherwise recompute in silence.

    actions: block label -> tag name -> choice.
    block: the requested label.
    others: the choices of blocks that `actions` does not name, or None.
    what: the name of the deciding object in the error, such as "plan".
    """
    found = actions.get(block, others)
    if found is None:
        if groups := ranges(actions, block):
            named = ", ".join(group_label(block, *group) for group in groups)
            raise TagError(
                f"remat_policy: the {what} decides groups of the layers of block {block!r} apart"
                f" ({named}), and one policy cannot; loop over the layers with jaxmem.stack(...,"
                " plan=plan), or say which layer it is: remat_policy(plan, layer=(i, L))"
            )
        known = ", ".join(map(repr, dict.fromkeys(map(ungrouped, actions)))) or "no block"
        raise TagError(
            f"remat_policy: the {what} knows no block {block!r}; it was made for {known}: give"
            " `block` one of these, or plan this model anew"
        )
    return dict(found)


_EXPECTED = (
    "expected a dict of block labels to dicts of tag names to Choice, such as"
    ' {"block": {"up": Choice("keep")}}'
)


def _checked(label, choices) -> dict[str, Choice]:
    """One block's choices, with names of actions made into choices."""
    if not isinstance(label, str) or not isinstance(choices, Mapping):
        raise TagError(f"Assignment: got {choices!r} for block {label!r}; {_EXPECTED}")
    return {tag: _choice(label, tag, choice) for tag, choice in choices.items()}


def _choice(label: str, tag, choice) -> Choice:
    """A choice, made of the name of an action where only the name was given."""
    if isinstance(choice, Choice) and isinstance(tag, str):
        return choice
    try:
        return Choice(Action(choice))
    except ValueError as error:
        raise TagError(
            f"Assignment: got {choice!r} for tag {tag!r} of block {label!r} ({error}); {_EXPECTED}"
        ) from None
