"""Checks what a file holds: an error names the field that is broken."""

import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem._core.actions import Action, Actions, Choice
from jaxmem._model.codecs.forms import nearest, parse
from jaxmem.errors import TagError

WHOLE, FINITE = "a whole number of at least 0", "a finite number of at least 0"


class Broken(Exception):
    """A field that is not what it must be: `read` adds the file's name and raises PlanFileError.

    field: the path of the field, such as `rows[3].shape`.
    got: its value as a text, cut where it is long.
    expected: what it must be, in words.
    """

    def __init__(self, field: str, got: Any, expected: str):
        super().__init__(field, got, expected)
        self.field, self.got, self.expected = field, reprlib.repr(got), expected


def checked(value: Any, field: str, fields: Mapping[str, tuple]) -> dict[str, Any]:
    """An object that has these fields and no others, each of which holds."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise Broken(field, value, f"an object with {', '.join(fields)}")
    for name, (expected, holds) in fields.items():
        if not holds(value[name]):
            raise Broken(f"{field}.{name}", value[name], expected)
    return value


def refuse_unknown(value: Mapping[str, Any], field: str, known: Sequence[str]) -> None:
    """Raises Broken where an object has a field that is not known: misspelt, one that may be left
    out would be left out in silence.
    """
    for name in sorted(value.keys() - set(known)):
        at, near = f"{field}.{name}" if field else name, nearest(name.lower(), known)
        raise Broken(at, value[name], f"no such field; the nearest is {near}")


def is_number(value: Any) -> bool:
    """Whether a value is a number of at least 0 that a float can stand for."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and 0 <= value <= sys.float_info.max


def is_size(value: Any) -> bool:
    """Whether a value is a whole number that fits 64 bits with a sign."""
    return type(value) is int and 0 <= value < 2**63


def is_text(value: Any) -> bool:
    """Whether a value is a text that can be printed: JSON can write half of a character."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def read_actions(value: Any, field: str = "actions") -> dict[str, dict[str, Choice]]:
    """Undoes `plain_actions`. Raises Broken."""
    is_nested = isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
    labels = [*value, *(tag for tags in value.values() for tag in tags)] if is_nested else []
    if not labels or not all(map(is_text, labels)):
        raise Broken(field, value, "an object: block -> tag -> action")
    return {
        block: {tag: read_choice(choice, f"{field}.{block}.{tag}") for tag, choice in tags.items()}
        for block, tags in value.items()
    }


def plain_actions(actions: Actions) -> dict[str, Any]:
    """Actions as dicts and texts."""
    return {
        block: {tag: plain_choice(choice) for tag, choice in tags.items()}
        for block, tags in actions.items()
    }


def plain_choice(choice: Choice) -> dict[str, str]:
    """A choice as texts."""
    codec = {"codec": choice.codec} if choice.codec else {}
    return {"action": choice.action.value} | codec


def read_choice(value: Any, field: str) -> Choice:
    """Undoes `plain_choice`. A codec is parsed and written again: equal codecs have equal texts.
    Raises Broken.
    """
    if not isinstance(value, dict):
        raise Broken(field, value, "an object with `action`, and `codec` where it compresses")
    if value.get("action") not in list(Action):
        raise Broken(f"{field}.action", value.get("action"), f"one of {', '.join(Action)}")
    refuse_unknown(value, field, ("action", "codec"))
    codec = value.get("codec")
    try:
        codec = None if codec is None else str(parse(codec))
    except (TagError, TypeError, AttributeError) as error:
        raise Broken(f"{field}.codec", codec, f"a codec ({error})") from error
    try:
        return Choice(Action(value["action"]), codec)
    except ValueError as error:
        raise Broken(field, value, str(error)) from error
