"""A TOML file and `key.sub=value` overrides -> Config, or an InputError with file, key, value and
what is allowed.
"""

import pathlib
import tomllib
import typing
from typing import Any

import pydantic

from experiments.config.text import Config
from experiments.errors import InputError, nearest

C = typing.TypeVar("C", bound=pydantic.BaseModel)
FOLDER = pathlib.Path(__file__).parents[2] / "configs"


@typing.overload
def load(name: str, overrides: typing.Sequence[str] = ()) -> Config: ...
@typing.overload
def load(name: str, overrides: typing.Sequence[str], schema: type[C]) -> C: ...
def load(
    name: str, overrides: typing.Sequence[str] = (), schema: type[pydantic.BaseModel] = Config
) -> Any:
    """The experiment `name`, a path or the name of a file in `configs/`, with `key.sub=value`
    settings on top.

    Fewer `train.steps` than the file's `optimizer.warmup` shorten that too, unless it is among the
    settings. `schema`: the kind of experiment.
    """
    path = find(name)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    sources: dict[str, str] = {}
    for text in overrides:
        key, value = parse_override(text)
        _set(data, key, value, text)
        sources[key] = text
    if "train.steps" in sources and "optimizer.warmup" not in sources:
        _shorten_warmup(data)
    try:
        return schema.model_validate(data)
    except pydantic.ValidationError as error:
        raise InputError(_explain(error, data, str(path), sources, schema)) from error


def find(name: str) -> pathlib.Path:
    """The file of a config: a path, or a name in `configs/`."""
    path = pathlib.Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if not path.is_file():
            raise InputError(
                f"{name}: no such config file; give a TOML file, or a name: {', '.join(_names())}"
            )
        return path
    if name not in _names():
        raise InputError(
            f"{name!r}: no such config{nearest(name, _names())}; there are: {', '.join(_names())};"
            " or give a TOML file"
        )
    return FOLDER / f"{name}.toml"


def _names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def parse_override(text: str) -> tuple[str, Any]:
    """`train.steps=20` -> ("train.steps", 20). Values are TOML; what is not TOML is a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not all(part.isidentifier() for part in key.split(".")):
        raise InputError(
            f"override {text!r}: got no setting; allowed: section.key=value, such as train.steps=20"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    return key, parsed["value"] if set(parsed) == {"value"} else value


def _set(data: dict, key: str, value: Any, text: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise InputError(f"override {text!r}: {section} is a value, not a section")
    data[last] = value


def _shorten_warmup(data: dict) -> None:
    steps, optimizer = data["train"]["steps"], data.get("optimizer")
    warmup = optimizer.get("warmup") if isinstance(optimizer, dict) else None
    if isinstance(optimizer, dict) and type(warmup) is int and type(steps) is int:
        optimizer["warmup"] = min(warmup, max(0, steps))


def _explain(
    error: pydantic.ValidationError, data: dict, path: str, sources: dict[str, str], schema: Any
) -> str:
    problems: dict[str, list[Any]] = {}  # a union reports one problem for each of its members
    for problem in error.errors(include_url=False):
        problems.setdefault(_key(problem["loc"], data), []).append(problem)
    lines = []
    for key, group in problems.items():
        line = _line(key, group, schema)
        cause = next(
            (text for k, text in sources.items() if k in line or k.startswith(f"{key}.")), None
        )
        lines.append(f"{path}{f' with override {cause!r}' if cause else ''}: {line}")
    return "\n".join(lines)


def _key(location: tuple, data: Any) -> str:
    """The dotted key of a problem: its location in the data, less the names pydantic gives to a
    union's members.
    """
    parts: list[str] = []
    for part in location:
        if isinstance(part, int) and isinstance(data, list):
            parts[-1] += f"[{part}]"
            data = data[part]
        elif isinstance(part, str) and isinstance(data, dict):
            parts.append(part)
            data = data.get(part)
    return ".".join(parts)


def _line(key: str, group: list[Any], schema: Any) -> str:
    problem = group[0]
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        section, _, _ = key.rpartition(".")
        names = _fields(section, schema)
        full = [f"{section}.{n}" if section else n for n in names]
        return (
            f"{key}: unknown key, got {problem['input']!r}{nearest(key, full)}; allowed:"
            f" {', '.join(names)}"
        )
    if problem["type"] == "missing":
        what = "section" if "." not in key else "key"
        return f"{key}: missing {what}; it has no default"
    got = problem["input"]
    allowed = " or ".join(dict.fromkeys(_allowed(p) for p in group))
    choices = [
        c.strip("'")
        for p in group
        if p["type"] == "literal_error"
        for c in p["ctx"]["expected"].replace(" or ", ", ").split(", ")
    ]
    return (
        f"{key}: got {got!r}{nearest(got, choices) if isinstance(got, str) else ''}; allowed:"
        f" {allowed}"
    )


_TYPES = {
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
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _allowed(problem: Any) -> str:
    context = problem.get("ctx", {})
    if problem["type"] == "literal_error":
        return f"one of {context['expected']}"
    for bound, words in _BOUNDS.items():
        if bound in context:
            return f"{words} {context[bound]}"
    return str(_TYPES.get(problem["type"], problem["msg"]))


def _fields(section: str, model: Any) -> list[str]:
    for part in filter(None, section.split(".")):
        model = model.model_fields[part].annotation
    return list(model.model_fields)
