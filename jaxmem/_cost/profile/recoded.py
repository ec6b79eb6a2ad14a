"""Assignments of earlier plans, whose codecs had room for other numbers of outliers."""

from jaxmem._core.actions import Actions, Choice
from jaxmem._core.profile import Option, Profile, Tag
from jaxmem._model.codecs.registry import parse


def recoded(profile: Profile, actions: Actions) -> tuple[Actions, int]:
    """An assignment with the codecs that the profile has prices for, where it names the same ones
    with other fields; and the bytes that all layers then save more.
    """
    found = {label: dict(choices) for label, choices in actions.items()}
    more = 0
    for block in profile.blocks:
        for tag in block.tags:
            choice = actions.get(block.name, {}).get(tag.name)
            if choice is None or (option := _other(tag, choice)) is None:
                continue
            found[block.name][tag.name] = option.choice
            if not option.choice.action.offloads:
                assert choice.codec is not None
                was = tag.turns * parse(choice.codec).nbytes(tag.shape, tag.dtype)
                more += block.layers * (option.device_bytes - was // tag.shards)
    return found, more


def _other(tag: Tag, choice: Choice) -> Option | None:
    """The option of the same action and codec, if the choice itself is none."""
    if choice.codec is None or any(o.choice == choice for o in tag.options):
        return None
    name = lambda codec: (codec or "").partition("(")[0]
    same = (o for o in tag.options if o.choice.action is choice.action)
    return next((o for o in same if name(o.choice.codec) == name(choice.codec)), None)
