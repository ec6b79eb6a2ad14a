"""Reads JSON into dataclasses, and converts dataclasses to JSON. Every value is checked against the
annotation of its field, and an error names the field that is broken.

A file may come from another machine or from an editor, so nothing in it is trusted. The alternative
is a library that checks types, such as msgspec or pydantic. It would be a dependency of every user,
and texts, ranges and tensors' choices would still need checks and messages of our own.
"""

import contextlib
import dataclasses
import difflib
import enum
import functools
import numbers
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jaxmem.errors import PlanFileError

T = TypeVar("T")
Read = Callable[[Any], Any]
INT_LIMIT = 2**63  # whole numbers are below it, so that 64 bits with a sign hold them


class Broken(ValueError):
    """A value that is not what its annotation says.

    value: the value in the file.
    expected: the expected value, in words.
    field: the path of the value, such as `rows[3].shape`; "" for the whole file.
    """

    def __init__(self, value: Any, expected: str, field: str = ""):
        super().__init__(value, expected, field)
        self.value, self.expected, self.field = value, expected, field

    def __str__(self) -> str:
        where = f"field `{self.field}`: " if self.field else ""
        return f"{where}got {reprlib.repr(self.value)}, expected {self.expected}"

    def prefix(self, key: str | int) -> None:
        """Extends the path by the key under which an object or a list holds the value."""
        inner = self.field if self.field.startswith("[") or not self.field else f".{self.field}"
        self.field = f"[{key}]{inner}" if isinstance(key, int) else f"{key}{inner}"


@dataclasses.dataclass(frozen=True)
class Valid:
    """What is valid in a field, written into its annotation: `Annotated[int, Valid(...)]`.

    expected: the expected value, in words.
    holds: whether a value is so.
    instead: whether the check replaces the check of the type. Otherwise both must hold.
    make: converts a value that was read.
    """

    expected: str
    holds: Callable[[Any], bool]
    instead: bool = False
    make: Callable[[Any], Any] = lambda value: value


def one_of(words: typing.Iterable[str]) -> Valid:
    """The check that a text is one of `words`."""
    words = tuple(words)
    return Valid(f"one of {', '.join(words)}", lambda value: value in words)


def is_number(value: Any) -> typing.TypeGuard[float]:
    """Whether a value is a number of at least 0 that a float can stand for."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and 0 <= value <= sys.float_info.max


def is_size(value: Any) -> bool:
    """Whether a value is a whole number that fits 64 bits with a sign."""
    return type(value) is int and 0 <= value < INT_LIMIT


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether an argument is a whole number of Python or NumPy, at least `least`, and no bool."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and int(value) >= least


def is_text(value: Any) -> bool:
    """Whether a value is a text that can be printed: JSON can write half of a character."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


# What the types of JSON's plain values mean, unless an annotation says otherwise.
_PLAIN = {
    int: Valid("a whole number of at least 0", is_size),
    float: Valid("a finite number of at least 0", is_number, make=float),
    str: Valid("a text", is_text),
    bool: Valid("true or false", lambda value: isinstance(value, bool)),
    Any: Valid("any value", lambda value: True),
}
_TEXT = Valid("a text", lambda value: isinstance(value, str))
Count = typing.Annotated[int, Valid("a whole number of at least 1", bool)]
Name = typing.Annotated[str, Valid("a text that is not empty", bool)]


class Reader:
    """Reads dataclasses from JSON, and converts them to JSON.

    strict: whether an unknown field is an error, and a text must be printable. Otherwise the field
      is ignored, and a text may be any. Files that people edit are read strictly: a misspelt name
      of a field that may be missing would be ignored too.
    special: type -> a function that reads it, from the value and the function that reads the type
      by its annotations. The function raises Broken.
    whole: dataclasses whose fields are all written, and must all be there. In other ones, a field
      that is equal to its default is not written, and a field that has a default may be missing.
    bare: dataclasses of one field. The file holds the field's value in place of an object.
    """

    def __init__(
        self,
        strict: bool = False,
        special: Mapping[type, Callable[[Any, Read], Any]] | None = None,
        whole: tuple[type, ...] = (),
        bare: tuple[type, ...] = (),
    ):
        self._strict, self._special = strict, special or {}
        self._whole, self._bare = whole, bare
        self._reads: dict[Any, Read] = {}

    def read(self, kind: type[T], value: Any) -> T:
        """Returns the instance of `kind` that `value` stands for. Raises Broken."""
        return self._of(kind)(value)

    def plain(self, value: Any) -> Any:
        """Returns `value` as dicts, lists, texts and numbers: what `read` reads."""
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, Mapping):
            return {key: self.plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(one) for one in value]
        if not dataclasses.is_dataclass(value):
            return value
        kind = type(value)
        fields = {name: getattr(value, name) for name in _fields(kind)}
        if kind in self._bare:
            (value,) = fields.values()
            return self.plain(value)
        omitted = {} if kind in self._whole else _defaults(kind)
        return {k: self.plain(v) for k, v in fields.items() if k not in omitted or v != omitted[k]}

    def _of(self, kind: Any) -> Read:
        """The function that reads a type."""
        if kind not in self._reads:
            read = self._made(kind)
            special = self._special.get(kind)
            self._reads[kind] = read if special is None else lambda value: special(value, read)
        return self._reads[kind]

    def _made(self, kind: Any) -> Read:
        """Makes the function that reads values of a type."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind is str and not self._strict:
            return functools.partial(_plain, _TEXT)
        if kind in _PLAIN:
            return functools.partial(_plain, _PLAIN[kind])
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            known = one_of(str(member.value) for member in kind)
            return functools.partial(_plain, dataclasses.replace(known, make=kind))
        if dataclasses.is_dataclass(kind):
            return functools.partial(self._record, kind)
        if origin is typing.Annotated:
            read = self._of(arguments[0])
            for check in arguments[1:]:
                read = functools.partial(_checked, check, self._of(Any) if check.instead else read)
            return read
        if origin in (typing.Union, types.UnionType):  # of a type and None
            (inner,) = (one for one in arguments if one is not type(None))
            return functools.partial(_nullable, self._of(inner))
        if origin is tuple and arguments[-1] is not Ellipsis:
            return functools.partial(_row, [self._of(one) for one in arguments])
        if origin is tuple:
            return functools.partial(_list, self._of(arguments[0]))
        return functools.partial(_object, self._of(arguments[1]))

    def _record(self, kind: type, value: Any) -> Any:
        """Reads an object as a dataclass of this type."""
        fields = _fields(kind)
        if kind in self._bare:
            ((name, annotation),) = fields.items()
            return kind(**{name: self._of(annotation)(value)})
        if not isinstance(value, dict):
            raise Broken(value, f"an object with {', '.join(fields)}")
        for name in sorted(value.keys() - fields.keys()) if self._strict else ():
            (near,) = difflib.get_close_matches(name.lower(), fields, n=1, cutoff=0)
            raise Broken(value[name], f"no such field; the nearest is {near}", name)
        optional = {} if kind in self._whole else _defaults(kind)
        # An error about a broken field helps more than an error about a missing field, so the
        # fields that are there come first.
        found = {n: _read_part(n, self._of(fields[n]), value[n]) for n in fields if n in value}
        for name in [n for n in fields if n not in found and n not in optional]:
            _read_part(name, self._of(fields[name]), None)
            raise Broken(None, "this field, with a value or null", name)
        return kind(**found)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The annotations of the fields that a file holds: private fields are not written."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = (field.name for field in dataclasses.fields(kind))
    return {name: hints[name] for name in names if not name.startswith("_")}


@functools.cache
def _defaults(kind: type) -> dict[str, Any]:
    """The defaults of the fields that have one."""
    none, found = dataclasses.MISSING, {}
    for field in dataclasses.fields(kind):
        if field.default is not none:
            found[field.name] = field.default
        elif field.default_factory is not none:
            found[field.name] = field.default_factory()
    return found


def _read_part(key: str | int, read: Read, value: Any) -> Any:
    """Reads a part of a value. An error then names the part, `key`, in front of its field."""
    try:
        return read(value)
    except Broken as broken:
        broken.prefix(key)
        raise


def _plain(check: Valid, value: Any) -> Any:
    """Reads a value without parts, such as a number or a text."""
    if not check.holds(value):
        raise Broken(value, check.expected)
    return check.make(value)


def _checked(check: Valid, read: Read, value: Any) -> Any:
    """Reads a value, and applies the check of an annotated type."""
    try:
        return _plain(check, read(value))
    except Broken as broken:
        # The check describes the whole value; a part of the value has a check of its own.
        raise broken if broken.field else Broken(value, check.expected) from broken


def _nullable(read: Read, value: Any) -> Any:
    """Reads a value or null."""
    try:
        return None if value is None else read(value)
    except Broken as broken:
        if not broken.field:
            broken.expected += " or null"
        raise


def _list(read: Read, value: Any) -> tuple:
    """Reads a list of equal parts as a tuple."""
    if not isinstance(value, list):
        raise Broken(value, "a list")
    return tuple(_read_part(i, read, one) for i, one in enumerate(value))


def _row(reads: list[Read], value: Any) -> tuple:
    """Reads a list of a fixed number of parts, each of its own type, as a tuple."""
    if not isinstance(value, list) or len(value) != len(reads):
        raise Broken(value, f"a list of {len(reads)} values")
    return tuple(_read_part(i, read, one) for i, (read, one) in enumerate(zip(reads, value)))


def _object(read: Read, value: Any) -> dict[str, Any]:
    """Reads an object with any keys as a dict."""
    # A key that cannot be printed is not named.
    if not isinstance(value, dict) or not all(map(is_text, value)):
        raise Broken(value, "an object")
    return {key: _read_part(key, read, one) for key, one in value.items()}


@contextlib.contextmanager
def named(
    by: str, path: str | os.PathLike, wrote: str, mend: str, line: int | None = None
) -> Iterator[None]:
    """Raises PlanFileError, which names the file and the field, for an error in the statement.

    by: who reads, with which the message begins.
    wrote: what kind of file is expected.
    mend: what to do about a broken field.
    line: the number of the line in a file of rows.
    """
    where = f"{str(path)!r}" + (f", line {line}" if line else "")
    try:
        yield
    except Broken as broken:
        got, field = broken.value, broken.field
        if not field and not line:
            got, field = type(got).__name__, "(the whole file)"
        if field:
            where = f"{where}, field `{field}`"
        raise PlanFileError(
            f"{by} {where}: got {reprlib.repr(got)}, expected {broken.expected}; {mend}"
        ) from broken.__cause__
    except (OSError, ValueError, TypeError) as error:
        raise PlanFileError(f"{by} cannot read {where}: {error}; expected {wrote}") from error
