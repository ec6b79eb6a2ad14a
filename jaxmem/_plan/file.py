"""A plan as JSON, and back: every field is looked at, and the one that is broken is named."""

import dataclasses
import math
from typing import Any, NoReturn

from jaxmem._codecs.registry import parse
from jaxmem._core.actions import Action, Choice
from jaxmem._plan.plan import Bytes, Plan, Point, Row
from jaxmem.errors import PlanFileError, TagError

SCHEMA = 1

_NUMBERS = {
    "budget_bytes": int, "predicted_bytes": int, "compiled_bytes": int, "baseline_bytes": int, "host_bytes": int,
    "predicted_seconds": float, "baseline_seconds": float, "profile_seconds": float, "solve_seconds": float,
    "compile_seconds": float, "compiles": int,
}  # fmt: skip
_is_text = lambda v: isinstance(v, str)
_is_size = lambda v: type(v) is int and 0 <= v < 2**63
_ROW = {
    "block": ("a text", _is_text),
    "tag": ("a text", _is_text),
    "kind": ("a text or null", lambda v: v is None or _is_text(v)),
    "shape": ("a list of whole numbers", lambda v: isinstance(v, list) and all(map(_is_size, v))),
    "dtype": ("a text", _is_text),
    "bytes_before": ("a whole number of bytes", _is_size),
    "bytes_after": ("a whole number of bytes", _is_size),
    "milliseconds": ("a finite number of at least 0", lambda v: _is_number(v)),
    "why": ("a text", _is_text),
    "layers": ("a whole number of at least 1", lambda v: _is_size(v) and v > 0),
}
_TEXTS = ("time_source", "target", "fingerprint", "jax_version")


def to_json(plan: Plan) -> dict:
    one = lambda c: {"action": c.action.value} | ({"codec": c.codec} if c.codec else {})
    rows = [dataclasses.asdict(r) | {"choice": one(r.choice)} for r in plan.rows]
    return (
        {"schema": SCHEMA}
        | {k: getattr(plan, k) for k in (*_NUMBERS, *_TEXTS)}
        | {"actions": {b: {t: one(c) for t, c in tags.items()} for b, tags in plan.actions.items()}}
        | {k: dataclasses.asdict(getattr(plan, k)) for k in ("parts", "baseline_parts")}
        | ({} if plan.microbatches is None else {"microbatches": plan.microbatches})
        | {
            "notes": list(plan.notes),
            "rows": rows,
            "points": [dataclasses.asdict(p) for p in plan.points],
        }
    )


def from_json(data, path: str) -> Plan:
    def fail(field: str, got, expected: str) -> NoReturn:
        raise PlanFileError(
            f"Plan.load: {path!r}, field `{field}`: got {got!r}, expected {expected}; plan again,"
            " or mend the file"
        )

    def choice(value, field: str) -> Choice:
        if not isinstance(value, dict):
            fail(field, value, "an object with `action`, and `codec` where it compresses")
        if value.get("action") not in list(Action):
            fail(f"{field}.action", value.get("action"), f"one of {', '.join(Action)}")
        codec = value.get("codec")
        try:
            codec = None if codec is None else str(parse(codec))
        except (TagError, TypeError, AttributeError) as error:
            fail(f"{field}.codec", codec, f"a codec ({error})")
        try:
            return Choice(Action(value["action"]), codec)
        except ValueError as error:
            fail(field, value, str(error))

    def row(value, field: str) -> Row:
        if not isinstance(value, dict) or value.keys() != {"choice", *_ROW}:
            fail(field, value, f"an object with choice, {', '.join(_ROW)}")
        for name, (expected, holds) in _ROW.items():
            if not holds(value[name]):
                fail(f"{field}.{name}", value[name], expected)
        return Row(
            **(
                value
                | {
                    "choice": choice(value["choice"], f"{field}.choice"),
                    "shape": tuple(value["shape"]),
                }
            )
        )

    def sizes(value, field: str) -> Bytes:
        names = [f.name for f in dataclasses.fields(Bytes)]
        if not isinstance(value, dict) or any(type(value.get(n)) is not int for n in names):
            fail(field, value, f"whole numbers {', '.join(names)}")
        return Bytes(*(value[n] for n in names))

    def point(value, field: str) -> Point:
        if not isinstance(value, dict) or not all(
            _is_number(value.get(n)) for n in ("bytes", "seconds")
        ):
            fail(field, value, "`bytes` and `seconds`, finite numbers of at least 0")
        return Point(int(value["bytes"]), float(value["seconds"]))

    if not isinstance(data, dict):
        fail("(the whole file)", type(data).__name__, "an object")
    if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
        fail("schema", data.get("schema"), f"{SCHEMA}, the one this jaxmem reads")
    fields: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        value: Any = data.get(name)
        if not (_is_number(value) and isinstance(value, (int, kind))):
            fail(
                name,
                value,
                "a whole number of at least 0" if kind is int else "a finite number of at least 0",
            )
        fields[name] = kind(value)
    for name in _TEXTS:
        if not isinstance(data.get(name), str) or not data[name]:
            fail(name, data.get(name), "a text")
        fields[name] = data[name]
    actions = data.get("actions")
    if (
        not isinstance(actions, dict)
        or not actions
        or not all(isinstance(v, dict) for v in actions.values())
    ):
        fail("actions", actions, "an object: block -> tag -> action")
    parsed = {
        b: {t: choice(c, f"actions.{b}.{t}") for t, c in tags.items()}
        for b, tags in actions.items()
    }
    notes, rows = data.get("notes", []), data.get("rows", [])
    if not isinstance(notes, list) or not all(isinstance(n, str) for n in notes):
        fail("notes", notes, "a list of texts")
    if not isinstance(rows, list):
        fail("rows", rows, "a list of the table's lines")
    made = tuple(row(r, f"rows[{i}]") for i, r in enumerate(rows))
    for name in ("parts", "baseline_parts"):
        fields[name] = sizes(data.get(name), name)
    points = data.get("points", [])
    if not isinstance(points, list):
        fail("points", points, "a list of bytes and seconds")
    fields["points"] = tuple(point(p, f"points[{i}]") for i, p in enumerate(points))
    fields["microbatches"] = number = data.get("microbatches")
    if number is not None and not (_is_size(number) and number > 0):
        fail("microbatches", number, "a whole number of at least 1, or nothing")
    return Plan(actions=parsed, rows=made, notes=tuple(notes), **fields)


def _is_number(value) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )
