"""Plan: what was decided, frozen and JSON, with the table that says why."""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any, NoReturn

from jaxmem._budget import show_bytes
from jaxmem._errors import PlanFileError, StepError, TagError
from jaxmem._types import KEEP, REST, Action, Actions, Choice

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One tag's line of the table: bytes and milliseconds of one layer."""

    block: str
    tag: str
    kind: str | None
    shape: tuple[int, ...]
    dtype: str
    choice: Choice
    bytes_before: int
    bytes_after: int
    milliseconds: float
    why: str


@dataclasses.dataclass(frozen=True)
class Draft:
    """Actions that `build` can be given before they are a Plan. A block that they do not name is recomputed."""

    actions: Actions = dataclasses.field(default_factory=dict)

    def choices_for(self, block: str) -> dict[str, Choice] | None:
        return dict(self.actions.get(block, {}))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step's actions, and what they cost.

    Bytes are of the whole step on one device: arguments + temporaries + outputs - what is aliased. `predicted_bytes`
    was said before the compile that gave `compiled_bytes`. `baseline_bytes` is the step with everything kept.
    `host_bytes` lie in host memory. Seconds are of one step, from `time_source`.
    """

    actions: Actions
    budget_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    baseline_bytes: int
    host_bytes: int
    predicted_seconds: float
    baseline_seconds: float
    profile_seconds: float
    solve_seconds: float
    compile_seconds: float
    compiles: int
    time_source: str
    target: str
    fingerprint: str
    jax_version: str
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    _step: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def step(self):
        """The verified executable, called as the step is. Raises StepError if it was compiled for another device."""
        if self._step is None:
            raise StepError(
                f"Plan.step: this plan holds no executable: it was loaded, or compiled for target {self.target!r}, which is"
                " not this device; compile the step with jax.jit(build(plan), donate_argnums=0)"
            )
        return self._step

    @property
    def keeps_everything(self) -> bool:
        return all(choices.get(REST) == KEEP for choices in self.actions.values())

    def choices_for(self, block: str) -> dict[str, Choice]:
        """What becomes of each tag of a block; raises TagError if the plan knows no block of that label."""
        if block not in self.actions:
            raise TagError(
                f"remat_policy: the plan knows no block {block!r}; it was made for {', '.join(map(repr, self.actions))}:"
                " give `block` one of these, or plan this model anew"
            )
        return dict(self.actions[block])

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON. The file appears whole or not at all."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_to_json(self), indent=1) + "\n"
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(text)
        os.replace(part, path)

    @staticmethod
    def load(path: str | os.PathLike) -> "Plan":
        """Reads a plan. Raises PlanFileError, naming the field, if the file is broken or of another schema."""
        try:
            data = json.loads(pathlib.Path(path).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanFileError(
                f"Plan.load: cannot read {str(path)!r}: {error}; expected a file that Plan.save wrote"
            ) from error
        return _from_json(data, str(path))

    def __str__(self) -> str:
        return table(self)


def table(plan: Plan) -> str:
    head = ("tensor", "kind", "action", "codec", "before", "after", "ms", "why")
    lines: list[tuple[str, ...]] = [head]
    for row in plan.rows:
        name = row.tag if len(plan.actions) == 1 else f"{row.block}/{row.tag}"
        codec = (row.choice.codec or "-").split("(")[0]
        sizes = show_bytes(row.bytes_before), show_bytes(row.bytes_after)
        lines.append(
            (name, row.kind or "-", row.choice.action.value, codec, *sizes, f"{row.milliseconds:.3f}", row.why)
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    text = ["  ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]).rstrip() for line in lines]
    share = 100 * plan.compiled_bytes / plan.budget_bytes
    text += [
        "(bytes and ms of one layer)",
        f"predicted {show_bytes(plan.predicted_bytes)}, compiled {show_bytes(plan.compiled_bytes)} of a budget of"
        f" {show_bytes(plan.budget_bytes)} ({share:.1f} %) on {plan.target}; everything kept: {show_bytes(plan.baseline_bytes)}"
        + (f"; in host memory: {show_bytes(plan.host_bytes)}" if plan.host_bytes else ""),
        f"step {plan.predicted_seconds * 1e3:.2f} ms, everything kept {plan.baseline_seconds * 1e3:.2f} ms"
        f" (times: {plan.time_source}); {plan.compiles} compiles",
    ]
    return "\n".join(text + [f"note: {note}" for note in plan.notes])


_NUMBERS = {
    "budget_bytes": int, "predicted_bytes": int, "compiled_bytes": int, "baseline_bytes": int, "host_bytes": int,
    "predicted_seconds": float, "baseline_seconds": float, "profile_seconds": float, "solve_seconds": float,
    "compile_seconds": float, "compiles": int,
}  # fmt: skip
_TEXTS = ("time_source", "target", "fingerprint", "jax_version")


def _to_json(plan: Plan) -> dict:
    one = lambda c: {"action": c.action.value} | ({"codec": c.codec} if c.codec else {})
    rows = [dataclasses.asdict(r) | {"choice": one(r.choice)} for r in plan.rows]
    return (
        {"schema": SCHEMA}
        | {k: getattr(plan, k) for k in (*_NUMBERS, *_TEXTS)}
        | {"actions": {b: {t: one(c) for t, c in tags.items()} for b, tags in plan.actions.items()}}
        | {"notes": list(plan.notes), "rows": rows}
    )


def _from_json(data, path: str) -> Plan:
    def fail(field: str, got, expected: str) -> NoReturn:
        raise PlanFileError(
            f"Plan.load: {path!r}, field `{field}`: got {got!r}, expected {expected}; plan again, or mend the file"
        )

    def choice(value, field: str) -> Choice:
        from jaxmem._codecs import parse

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

    if not isinstance(data, dict):
        fail("(the whole file)", type(data).__name__, "an object")
    if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
        fail("schema", data.get("schema"), f"{SCHEMA}, the one this jaxmem reads")
    fields: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        value: Any = data.get(name)
        good = isinstance(value, (int, kind)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        if not good:
            fail(name, value, "a whole number of at least 0" if kind is int else "a finite number of at least 0")
        fields[name] = kind(value)
    for name in _TEXTS:
        if not isinstance(data.get(name), str) or not data[name]:
            fail(name, data.get(name), "a text")
        fields[name] = data[name]
    actions = data.get("actions")
    if not isinstance(actions, dict) or not actions or not all(isinstance(v, dict) for v in actions.values()):
        fail("actions", actions, "an object: block -> tag -> action")
    parsed = {b: {t: choice(c, f"actions.{b}.{t}") for t, c in tags.items()} for b, tags in actions.items()}
    notes, rows = data.get("notes", []), data.get("rows", [])
    if not isinstance(notes, list) or not all(isinstance(n, str) for n in notes):
        fail("notes", notes, "a list of texts")
    try:
        made = tuple(
            Row(**(r | {"choice": choice(r["choice"], f"rows[{i}].choice"), "shape": tuple(r["shape"])}))
            for i, r in enumerate(rows)
        )
    except (TypeError, KeyError) as error:
        fail("rows", f"{error}", "a list of the table's lines")
    return Plan(actions=parsed, rows=made, notes=tuple(notes), **fields)
