"""Reads a config from a TOML file and `key.sub=value` overrides. Raises InputError with the file,
the key, its value and the allowed values.
"""

import os
import pathlib
import tomllib
import typing
from typing import Any

import pydantic

from experiments.command.mistakes import explain
from experiments.config.glue import GlueConfig
from experiments.config.images import ImageConfig
from experiments.config.text import Config
from experiments.errors import InputError, nearest

C = typing.TypeVar("C", bound=pydantic.BaseModel)
FOLDER = pathlib.Path(__file__).parents[2] / "configs"
TRAINERS: dict[str, type[pydantic.BaseModel]] = {
    "experiments.train": Config,
    "experiments.train_glue": GlueConfig,
    "experiments.train_images": ImageConfig,
}


@typing.overload
def load(name: str, overrides: typing.Sequence[str] = ()) -> Config: ...
@typing.overload
def load(name: str, overrides: typing.Sequence[str], schema: type[C]) -> C: ...
def load(
    name: str, overrides: typing.Sequence[str] = (), schema: type[pydantic.BaseModel] = Config
) -> Any:
    """Returns the config `name`, a path or the name of a file in `configs/`, changed by
    `key.sub=value` overrides.

    If an override sets fewer `train.steps` than the file's `optimizer.warmup`, the warm-up is
    shortened too, unless another override sets it. `schema`: the kind of experiment.
    """
    path = find(name)
    data = read(path)
    if (trainer := other_trainer(data, schema)) is not None:
        raise InputError(
            f"{path}: a config of another kind of experiment; allowed: one for this command, or"
            f" `python -m {trainer} {name}`"
        )
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
        raise InputError(explain(error, data, str(path), sources, schema)) from error


def find(name: str) -> pathlib.Path:
    """Returns the file of a config from a path or a name in `configs/`."""
    path = pathlib.Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if not os.path.isfile(path):  # False for a name that is too long
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


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns the content of a TOML file of any kind of experiment."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise InputError(f"{path}: not TOML: {error}") from error


def other_trainer(data: dict[str, Any], schema: type[pydantic.BaseModel]) -> str | None:
    """Returns the command for which `data` are valid, if `schema` refuses them; otherwise None."""
    if _is_valid(data, schema):
        return None
    return next((name for name, other in TRAINERS.items() if _is_valid(data, other)), None)


def _is_valid(data: dict[str, Any], schema: type[pydantic.BaseModel]) -> bool:
    try:
        schema.model_validate(data)
    except pydantic.ValidationError:
        return False
    return True


def _names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def parse_override(text: str) -> tuple[str, Any]:
    """`train.steps=20` -> ("train.steps", 20). A value that is not TOML is read as a string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key or not all(part.isidentifier() for part in key.split(".")):
        raise InputError(
            f"override {text!r}: got no setting; allowed: section.key=value, such as train.steps=20"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
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
