"""Reads and writes a plan's file. This module knows no `Plan`, so that `Plan` can import it."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from jaxmem._core.actions import Action, Choice
from jaxmem._core.assignment import FLOAT, INT8
from jaxmem._core.files import read_json
from jaxmem._core.reader import Broken, Reader, is_size, named
from jaxmem._model.codecs.registry import parse
from jaxmem._model.states.places import DEVICE, HOST, Places
from jaxmem._result.plan.rows import NAMED_ACTIONS, Bytes
from jaxmem._result.plan.timeline import Pass
from jaxmem.errors import TagError

T = TypeVar("T")
SCHEMA = 1  # a file of another number is refused
# Fields of a plan that are written although they have a default.
_ALWAYS = ("uncertain_seconds", "baseline_source", "notes", "rows", "points")
_WROTE, _MEND = "a file that Plan.save wrote", "plan again, or mend the file"


def write(plan: Any) -> dict[str, Any]:
    """Returns the content of a plan's file."""
    always = {name: _READER.plain(getattr(plan, name)) for name in _ALWAYS}
    return {"schema": SCHEMA} | _READER.plain(plan) | always


def load(kind: type[T], path: str | os.PathLike) -> T:
    """Reads a plan, of the class `kind`, from a file. Raises PlanFileError, which names the field,
    if a field is broken.
    """
    with named("Plan.load:", path, _WROTE, _MEND):
        return plan_of(kind, read_json(path))


def read(kind: type[T], data: Any, path: str) -> T:
    """Returns the plan in `data`, the content of a plan's file or a part of another file.

    path: the name of the file in errors.

    Raises PlanFileError, which names the field, if a field is broken.
    """
    with named("Plan.load:", path, _WROTE, _MEND):
        return plan_of(kind, data)


def read_assignment(path: str | os.PathLike) -> dict[str, dict[str, Choice]]:
    """Reads the actions of an assignment that was written by hand, or the actions of a plan, from a
    file: block -> tag -> the name of an action, or an object as in a plan.

    Raises PlanFileError, which names the field, if the file cannot be read or a field is broken.
    """
    wrote = f"JSON of block -> tag -> action, or {_WROTE}"
    with named("policy:", path, wrote, "mend the file"):
        data = read_json(path)
        if isinstance(data, dict) and "schema" in data:
            data = data.get("actions")
        try:
            return _BY_NAME.read(NAMED_ACTIONS, data)  # pyright: ignore[reportArgumentType]
        except Broken as broken:
            broken.prefix("actions")
            raise


def without_schema(data: Any) -> dict[str, Any]:
    """The values of a file without the number of its schema. Raises Broken for another schema."""
    if not isinstance(data, dict):
        raise Broken(data, "an object")
    # True equals 1 in Python, and is no number here.
    schema = data.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise Broken(schema, f"{SCHEMA}, the one this jaxmem reads", "schema")
    return {k: v for k, v in data.items() if k != "schema"}


def plan_of(kind: type[T], data: Any) -> T:
    """Makes a plan of the values of JSON. Raises Broken for another schema, or without actions."""
    if isinstance(data, dict) and "cells" in data:
        reads = "no such field; this is the file of a frontier, which `Frontier.load` reads"
        raise Broken(data["cells"], reads, "cells")
    found: Any = _READER.read(kind, without_schema(data))
    # Of a step that its own checkpoints decide, a plan has no actions.
    if not found.actions and not found.as_written:
        raise Broken(found.actions, "an object: block -> tag -> action", "actions")
    if found.divided is not None and found.places is None:
        raise Broken(found.divided, "a division beside `places`, or nothing", "divided")
    if found.moments == INT8 and found.places is None:
        raise Broken(found.moments, f"{FLOAT!r} where there are no `places`", "moments")
    return found


def _choice(value: Any, _: Callable) -> Choice:
    """A codec is parsed and written again: equal codecs have equal texts."""
    if not isinstance(value, dict):
        raise Broken(value, "an object with `action`, and `codec` where it compresses")
    if value.get("action") not in list(Action):
        raise Broken(value.get("action"), f"one of {', '.join(Action)}", "action")
    for name in sorted(value.keys() - {"action", "codec"}):
        raise Broken(value[name], "no such field; there are action and codec", name)
    codec = value.get("codec")
    try:
        codec = None if codec is None else str(parse(codec))
    except (TagError, TypeError, AttributeError) as error:
        raise Broken(codec, f"a codec ({error})", "codec") from error
    try:
        return Choice(Action(value["action"]), codec)
    except ValueError as error:
        raise Broken(value, str(error)) from error


def _bytes(value: Any, read: Callable[[Any], Bytes]) -> Bytes:
    """Reads the parts of a plan's bytes, which are whole numbers."""
    found = read(value)
    total = found.arguments + found.saved + found.working
    if not is_size(total):
        raise Broken(value, "whole numbers of at least 0 in all")
    return Bytes.of(total, found.arguments, found.saved)


def _places(value: Any, read: Callable[[Any], Places]) -> Places:
    """Reads places of model states, and checks that the numbers of layers agree."""
    found = read(value)
    if found.outer_moments not in (DEVICE, HOST):
        raise Broken(found.outer_moments, f"{DEVICE!r} or {HOST!r}", "outer_moments")
    if not 0 <= found.buffers <= found.streamed:
        raise Broken(value, "no more layers of all kinds than there are")
    return found


_READER = Reader(
    strict=True,
    special={Choice: _choice, Bytes: _bytes, Places: _places},
    whole=(Places,),
    bare=(Pass,),
)
# A choice may be the name of an action alone.
_by_name = lambda value, read: _choice({"action": value} if isinstance(value, str) else value, read)
_BY_NAME = Reader(strict=True, special={Choice: _by_name})
