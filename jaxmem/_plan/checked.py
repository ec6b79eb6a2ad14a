"""Checks what a file holds: an error names the field that is broken."""

import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem._codecs.forms import nearest

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
