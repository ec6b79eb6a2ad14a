"""Writes a plan's fields as JSON and reads them back; every field is checked, and an error names
the one that is broken.

A plan's file may come from another machine or from an editor, so nothing in it is trusted. This
module works on fields and knows no `Plan`, so that `Plan` can import it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmem._core.actions import Choice
from jaxmem._model.states.places import DEVICE, DIVIDED, HOST, Places
from jaxmem._result.plan import timeline
from jaxmem._result.plan.checked import (
    FINITE,
    WHOLE,
    Broken,
    checked,
    is_number,
    is_size,
    is_text,
    plain_actions,
    plain_choice,
    read_actions,
    read_choice,
    refuse_unknown,
)
from jaxmem._result.plan.rows import Bytes, Measured, Point, Row, WrittenStep
from jaxmem.errors import PlanFileError

SCHEMA = 1  # a file of another number is refused

_BYTES = ("budget_bytes", "predicted_bytes", "compiled_bytes", "baseline_bytes", "host_bytes")
_SECONDS = (
    "predicted_seconds", "baseline_seconds", "profile_seconds", "solve_seconds", "compile_seconds",
)  # fmt: skip
# fields that older files lack, with what they mean there
_LATER = {"uncertain_seconds": 0.0, "baseline_source": "pieces"}
# what a number is read as; a number that is read as a float may be written as a whole one
_NUMBERS = dict.fromkeys((*_BYTES, "compiles"), int) | dict.fromkeys(_SECONDS, float)
_TEXTS = ("time_source", "target", "fingerprint", "jax_version")
_CHOSEN = ("microbatches", "batch")  # numbers that are there where the planner chose them
_PARTS = ("parts", "baseline_parts")
_LISTS = ("notes", "rows", "points", "measured")
_OBJECTS = (
    "actions",
    "places",
    "lanes",
    "divided",
    "compiler_options",
    "as_written",
    "written",
    "lossy",
)
_KNOWN = ("schema", *_NUMBERS, *_TEXTS, *_LATER, *_CHOSEN, *_PARTS, *_LISTS, *_OBJECTS)


def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a plan's file holds, from the plan's fields by name."""
    named = (*_NUMBERS, *_TEXTS, *_LATER)
    data: dict[str, Any] = {"schema": SCHEMA} | {name: fields[name] for name in named}
    data["actions"] = plain_actions(fields["actions"])
    data |= {name: dataclasses.asdict(fields[name]) for name in _PARTS}
    if fields["places"] is not None:
        data["places"] = dataclasses.asdict(fields["places"])
    if fields["lanes"] is not None:
        data["lanes"] = timeline.write(fields["lanes"])
    data |= {name: fields[name] for name in _CHOSEN if fields[name] is not None}
    if fields["as_written"]:
        data["as_written"] = True
    if fields["lossy"]:
        data["lossy"] = fields["lossy"]
    if fields["written"] is not None:
        data["written"] = dataclasses.asdict(fields["written"])
    if fields["divided"] is not None:
        data["divided"] = fields["divided"]
    if fields["compiler_options"]:
        data["compiler_options"] = dict(fields["compiler_options"])
    data["notes"] = list(fields["notes"])
    data["rows"] = [
        dataclasses.asdict(row) | {"choice": plain_choice(row.choice)} for row in fields["rows"]
    ]
    for row in data["rows"]:
        if row["count"] == 1:  # as most are, and all were when the schema was made
            del row["count"]
    data["points"] = [
        {"bytes": point.bytes, "seconds": point.seconds}
        | ({"actions": plain_actions(point.actions)} if point.actions else {})
        | ({"uncertain_seconds": u} if (u := point.uncertain_seconds) else {})
        for point in fields["points"]
    ]
    if fields["measured"]:
        data["measured"] = [dataclasses.asdict(one) for one in fields["measured"]]
    return data


def read(data: Any, path: str) -> dict[str, Any]:
    """Returns a plan's fields by name, from what its file holds.

    `path` is named in errors. Raises PlanFileError, naming the field, where one is broken.
    """
    try:
        return _fields(data)
    except Broken as broken:
        raise PlanFileError(
            f"Plan.load: {path!r}, field `{broken.field}`: got {broken.got}, expected"
            f" {broken.expected}; plan again, or mend the file"
        ) from broken.__cause__


def read_assignment(data: Any, path: str) -> dict[str, dict[str, Choice]]:
    """Returns the actions of an assignment that was written by hand, or those of a plan, from what
    its file holds: block -> tag -> the name of an action, or an object as in a plan.

    `path` is named in errors. Raises PlanFileError, naming the field, where one is broken.
    """
    if isinstance(data, dict) and "schema" in data:
        data = data.get("actions")
    if isinstance(data, dict):
        plain = lambda choice: {"action": choice} if isinstance(choice, str) else choice
        data = {
            block: {tag: plain(choice) for tag, choice in tags.items()}
            if isinstance(tags, dict)
            else tags
            for block, tags in data.items()
        }
    try:
        return read_actions(data)
    except Broken as broken:
        raise PlanFileError(
            f"policy {path!r}, field `{broken.field}`: got {broken.got}, expected"
            f" {broken.expected}; mend the file"
        ) from broken.__cause__


def _fields(data: Any) -> dict[str, Any]:
    """The fields, in the order in which they are checked. Raises Broken for the first bad one."""
    if not isinstance(data, dict):
        raise Broken("(the whole file)", type(data).__name__, "an object")
    # True equals 1 in Python, and is no number here; the same goes for every number below.
    if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
        raise Broken("schema", data.get("schema"), f"{SCHEMA}, the one this jaxmem reads")
    refuse_unknown(data, "", _KNOWN)
    fields: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        value: Any = data.get(name)
        if not (is_size(value) if kind is int else is_number(value)):
            raise Broken(name, value, WHOLE if kind is int else FINITE)
        fields[name] = kind(value)
    for name in _TEXTS:
        if not is_text(data.get(name)) or not data[name]:
            raise Broken(name, data.get(name), "a text")
        fields[name] = data[name]
    for name, usual in _LATER.items():
        value = data.get(name, usual)
        if isinstance(usual, str) and not (is_text(value) and value):
            raise Broken(name, value, "a text")
        if isinstance(usual, float) and not is_number(value):
            raise Broken(name, value, FINITE)
        fields[name] = type(usual)(value)
    as_written = data.get("as_written", False)
    if not isinstance(as_written, bool):
        raise Broken("as_written", as_written, "true or false")
    if not is_text(lossy := data.get("lossy", "")):
        raise Broken("lossy", lossy, "a text")
    # Of a step that its own checkpoints decide, a plan has no actions.
    decided = data.get("actions") != {} or not as_written
    fields["actions"] = read_actions(data.get("actions")) if decided else {}
    for name in _PARTS:
        fields[name] = _bytes(data.get(name), name)
    notes = _list(data, "notes", "a list of texts")
    if not all(map(is_text, notes)):
        raise Broken("notes", notes, "a list of texts")
    rows = _list(data, "rows", "a list of the table's lines")
    points = _list(data, "points", "a list of bytes and seconds")
    runs = _list(data, "measured", "a list of steps that were run")
    chosen = {name: data.get(name) for name in _CHOSEN}
    for name, number in chosen.items():
        if number is not None and not (is_size(number) and number > 0):
            raise Broken(name, number, "a whole number of at least 1, or nothing")
    divided = data.get("divided")
    if divided not in (None, *DIVIDED) or (divided is not None and data.get("places") is None):
        expected = f"one of {', '.join(DIVIDED)} beside `places`, or nothing"
        raise Broken("divided", divided, expected)
    options = data.get("compiler_options", {})
    if not (isinstance(options, dict) and all(isinstance(v, bool) for v in options.values())):
        raise Broken("compiler_options", options, "an object of XLA's options, each true or false")
    return fields | {
        "notes": tuple(notes),
        "compiler_options": options,
        "divided": divided,
        "as_written": as_written,
        "lossy": lossy,
        "written": _written(data.get("written")),
        "rows": tuple(_row(row, f"rows[{i}]") for i, row in enumerate(rows)),
        "points": tuple(_point(point, f"points[{i}]") for i, point in enumerate(points)),
        **chosen,
        "places": _places(data.get("places")),
        "lanes": timeline.read(data.get("lanes"), "lanes"),
        "measured": tuple(_measured(one, f"measured[{i}]") for i, one in enumerate(runs)),
    }


def _list(data: dict, name: str, expected: str) -> list:
    """The list in a field, which may be left out: it is empty then."""
    value = data.get(name, [])
    if not isinstance(value, list):
        raise Broken(name, value, expected)
    return value


# The fields of Row beside its choice, in words and as a test.
_ROW = {
    "block": ("a text", is_text),
    "tag": ("a text", is_text),
    "kind": ("a text or null", lambda v: v is None or is_text(v)),
    "shape": ("a list of whole numbers", lambda v: isinstance(v, list) and all(map(is_size, v))),
    "dtype": ("a text", is_text),
    "bytes_before": ("a whole number of bytes", is_size),
    "bytes_after": ("a whole number of bytes", is_size),
    "milliseconds": (FINITE, is_number),
    "why": ("a text", is_text),
    "layers": ("a whole number of at least 1", lambda v: is_size(v) and v > 0),
    "count": ("a whole number of at least 1", lambda v: is_size(v) and v > 0),
}


def _row(value: Any, field: str) -> Row:
    if isinstance(value, dict):
        value = {"count": 1} | value
    if not isinstance(value, dict) or "choice" not in value:
        raise Broken(field, value, f"an object with choice, {', '.join(_ROW)}")
    others = checked({k: v for k, v in value.items() if k != "choice"}, field, _ROW)
    choice = read_choice(value["choice"], f"{field}.choice")
    return Row(**(others | {"choice": choice, "shape": tuple(others["shape"])}))


# The fields of Measured, in words and as a test.
_MEASURED = {
    "name": ("a text", is_text),
    "bytes": ("a whole number of bytes", is_size),
    **dict.fromkeys(("lower", "median", "upper"), (FINITE, is_number)),
    "rounds": ("a whole number of at least 1", lambda v: is_size(v) and v > 0),
    "chosen": ("true or false", lambda v: isinstance(v, bool)),
}


def _measured(value: Any, field: str) -> Measured:
    return Measured(**checked(value, field, _MEASURED))


def _written(value: Any) -> WrittenStep | None:
    """The step as written; None where nothing is said."""
    if value is None:
        return None
    sizes = {"bytes": (WHOLE, is_size), "host_bytes": (WHOLE, is_size)}
    fields = sizes | {"seconds": (FINITE, is_number), "parts": ("an object", lambda v: True)}
    found = checked(value, "written", fields)
    parts = _bytes(found["parts"], "written.parts")
    return WrittenStep(found["bytes"], found["host_bytes"], float(found["seconds"]), parts)


def _places(value: Any) -> Places | None:
    """Where states lie; None where nothing is said."""
    if value is None:
        return None
    memory = ("'device' or 'pinned_host'", lambda v: v in (DEVICE, HOST))
    counts = dict.fromkeys(("layers", "persist", "copies", "buffers"), (WHOLE, is_size))
    found = Places(**checked(value, "places", counts | {"outer_moments": memory}))
    if not 0 <= found.buffers <= found.streamed:
        raise Broken("places", value, "no more layers of all kinds than there are")
    return found


def _bytes(value: Any, field: str) -> Bytes:
    names = [f.name for f in dataclasses.fields(Bytes)]
    if not isinstance(value, dict) or any(type(value.get(n)) is not int for n in names):
        raise Broken(field, value, f"whole numbers {', '.join(names)}")
    refuse_unknown(value, field, names)
    found = Bytes(*(value[n] for n in names))
    total = found.arguments + found.saved + found.working
    if not all(map(is_size, (total, found.arguments, found.saved))):
        raise Broken(field, value, f"whole numbers {', '.join(names)} of at least 0 in all")
    return Bytes.of(total, found.arguments, found.saved)  # earlier versions wrote less than nothing


def _point(value: Any, field: str) -> Point:
    if not isinstance(value, dict) or not is_size(value.get("bytes")):
        raise Broken(field, value, f"`bytes`, {WHOLE}, and `seconds`")
    if not is_number(value.get("seconds")):
        raise Broken(f"{field}.seconds", value.get("seconds"), FINITE)
    refuse_unknown(value, field, ("bytes", "seconds", "actions", "uncertain_seconds"))
    actions, uncertain = value.get("actions"), value.get("uncertain_seconds", 0.0)
    if not is_number(uncertain):
        raise Broken(f"{field}.uncertain_seconds", uncertain, "a finite number of at least 0")
    found = {} if actions is None else read_actions(actions, f"{field}.actions")
    return Point(value["bytes"], float(value["seconds"]), found, float(uncertain))
