"""Checks what a file holds: an error names the field that is broken."""

import math
from collections.abc import Mapping
from typing import Any

WHOLE, FINITE = "a whole number of at least 0", "a finite number of at least 0"


class Broken(Exception):
    """A field that is not what it must be: `read` adds the file's name and raises PlanFileError.

    field: the path of the field, such as `rows[3].shape`.
    got: its value.
    expected: what it must be, in words.
    """

    def __init__(self, field: str, got: Any, expected: str):
        super().__init__(field, got, expected)
        self.field, self.got, self.expected = field, got, expected


def checked(value: Any, field: str, fields: Mapping[str, tuple]) -> dict[str, Any]:
    """An object that has these fields and no others, each of which holds."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise Broken(field, value, f"an object with {', '.join(fields)}")
    for name, (expected, holds) in fields.items():
        if not holds(value[name]):
            raise Broken(f"{field}.{name}", value[name], expected)
    return value


def is_number(value: Any) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value) and value >= 0


def is_size(value: Any) -> bool:
    """Whether a value is a whole number that fits 64 bits with a sign."""
    return type(value) is int and 0 <= value < 2**63


def is_text(value: Any) -> bool:
    return isinstance(value, str)
