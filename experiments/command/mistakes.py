"""Formats pydantic's errors about a config, with the file, key, value and allowed values."""

import reprlib
from collections.abc import Mapping
from typing import Any

import pydantic

from experiments.errors import nearest

TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "list_type": "a list of texts",
    "too_short": "a list that is not empty",
    "finite_number": "a finite number",
    "model_type": "a section",
    "dict_type": "a section",
}
ONE_OF = "literal_error", "enum"
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
SHORT = reprlib.Repr()  # of a given value; shortens long values
SHORT.maxstring = SHORT.maxother = 80


def explain(
    error: pydantic.ValidationError,
    data: dict[str, Any],
    path: str,
    sources: Mapping[str, str],
    schema: type[pydantic.BaseModel],
) -> str:
    """Returns a line for each invalid key. `sources`: the override that set each key."""
    problems: dict[str, list[Any]] = {}  # a union reports one problem for each of its members
    for problem in error.errors(include_url=False):
        problems.setdefault(_key(problem, data), []).append(problem)
    lines = []
    for key, group in problems.items():
        line = _line(key, group, schema)
        inside = [text for k, text in sources.items() if k.startswith(f"{key}.")]
        lines.append(placed(line, path, sources, *inside))
    return "\n".join(lines)


def placed(line: str, path: str, sources: Mapping[str, str], *causes: str) -> str:
    """Returns a line about an error, after the file and the override that caused the error.
    `causes`: possible causes, in addition to the overrides whose keys `line` names.
    """
    named = [text for key, text in sources.items() if key in line]
    cause = next(iter((*named, *causes)), None)
    override = f" with override {SHORT.repr(cause)}" if cause else ""
    return f"{path}{override}: {line}"


def _key(problem: Any, data: Any) -> str:
    """Returns the dotted key of a problem: its location in the data, without pydantic's names of a
    union's members.
    """
    parts: list[str] = []
    for part in problem["loc"]:
        if isinstance(part, int) and isinstance(data, list):
            parts[-1] += f"[{part}]"
            data = data[part]
        elif isinstance(part, str) and isinstance(data, dict):
            if part not in data and problem["type"] != "missing":
                continue  # pydantic's name of a union's member
            parts.append(part)
            data = data.get(part)
    return ".".join(parts)


def _line(key: str, group: list[Any], schema: Any) -> str:
    problem = group[0]
    if problem["type"] == "value_error":
        said = str(problem["ctx"]["error"])
        return f"{key}: {said}" if said.startswith("got ") else said  # one value, or several
    if problem["type"] == "extra_forbidden":
        section, _, _ = key.rpartition(".")
        names = _fields(section, schema)
        full = [f"{section}.{n}" if section else n for n in names]
        return (
            f"{key}: unknown key, got {SHORT.repr(problem['input'])}{nearest(key, full)}; allowed:"
            f" {', '.join(names)}"
        )
    if problem["type"] == "missing":
        what = "section" if "." not in key else "key"
        return f"{key}: missing {what}; it has no default"
    got = problem["input"]
    kinds = dict.fromkeys(_allowed(p) for p in group)
    if "a number" in kinds:
        kinds.pop("a whole number", None)
    allowed = " or ".join(kinds)
    choices = [
        c.strip("'")
        for p in group
        if p["type"] in ONE_OF
        for c in p["ctx"]["expected"].replace(" or ", ", ").split(", ")
    ]
    meant = nearest(got, choices) if isinstance(got, str) else ""
    return f"{key}: got {SHORT.repr(got)}{meant}; allowed: {allowed}"


def _allowed(problem: Any) -> str:
    context, got = problem.get("ctx", {}), problem["input"]
    if problem["type"] in ONE_OF:
        return f"one of {context['expected']}"
    for bound, words in BOUNDS.items():
        if bound in context:
            return f"{words} {context[bound]}"
    if problem["type"] == "int_type" and isinstance(got, float) and got.is_integer():
        return f"a whole number, such as {int(got)}" if abs(got) < 1e15 else "a whole number"
    return str(TYPES.get(problem["type"], problem["msg"]))


def _fields(section: str, model: Any) -> list[str]:
    for part in filter(None, section.split(".")):
        model = model.model_fields[part].annotation
    return list(model.model_fields)
