"""Reads an explanation from its JSON; every field is checked, and an error names the one that is
broken. The file may come from another machine, or from an editor.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from jaxmem._core.files import read_json
from jaxmem._result.memory.explanation import Explanation, Item, Part
from jaxmem._result.memory.live import KINDS, Live, Phase, Series
from jaxmem._result.memory.moved import HOW, Moved
from jaxmem.errors import PlanFileError

T = TypeVar("T")
_SIZES, _TEXTS = ("total_bytes", "host_bytes"), ("target", "plan", "peak_at", "advice")
_PHASES = ("forward", "backward", "outside the gradient")


class _Broken(Exception):
    """A field, its value, and what it must be."""


def load(path: str | os.PathLike) -> Explanation:
    """Reads what `jaxmem explain --json` printed, or `Record.explained` wrote; keys that it does
    not know are passed over, and those that older versions lack may be missing.

    Raises PlanFileError, naming the field, if the file is broken.
    """
    try:
        return _explanation(read_json(path), "")
    except (OSError, ValueError) as error:
        raise PlanFileError(
            f"report: cannot read {str(path)!r}: {error}; expected a file that jaxmem explain"
            " --json wrote"
        ) from error
    except _Broken as broken:
        field, got, expected = broken.args
        raise PlanFileError(
            f"report: {str(path)!r}, field `{field.lstrip('.')}`: got {got!r:.60}, expected"
            f" {expected}; explain the step anew, or mend the file"
        ) from broken


def _explanation(data: Any, at: str) -> Explanation:
    fields: dict[str, Any] = {n: _size(_of(data, n, at), f"{at}.{n}") for n in _SIZES}
    fields |= {n: _text(_of(data, n, at), f"{at}.{n}") for n in _TEXTS}
    live, beside = data.get("live"), data.get("beside")
    if at and beside is not None:  # one stands beside another, and none beside that
        raise _Broken(f"{at}.beside", beside, "null")
    return Explanation(
        **fields,
        parts=_list(data, "parts", at, _part),
        host_parts=_list(data, "host_parts", at, _part),
        live=None if live is None else _live(live, f"{at}.live"),
        beside=None if beside is None else _explanation(beside, f"{at}.beside"),
        # None of older versions, which knew of no transfers.
        transfers=_list(data, "transfers", at, _moved) if "transfers" in data else (),
    )


def _part(data: Any, at: str) -> Part:
    kind = _one_of((*KINDS, "packing"), _of(data, "kind", at), f"{at}.kind")
    name, size = _text(_of(data, "name", at), f"{at}.name"), _of(data, "bytes", at)
    return Part(kind, name, _size(size, f"{at}.bytes"), _list(data, "items", at, _item))


def _item(data: Any, at: str) -> Item:
    sizes = (_size(_of(data, name, at), f"{at}.{name}") for name in ("bytes", "count"))
    return Item(_text(_of(data, "name", at), f"{at}.name"), *sizes)


def _live(data: Any, at: str) -> Live:
    instructions, total = (
        _size(_of(data, name, at), f"{at}.{name}") for name in ("instructions", "total_bytes")
    )
    parts, found_phases = _list(data, "parts", at, _series), _list(data, "phases", at, _phase)
    found = Live(instructions, total, parts, found_phases)
    ends = [-1, *(phase.last for phase in found.phases)]
    if not found.parts or not found.phases:
        raise _Broken(at, data, "`parts` and `phases`, at least one of each")
    for i, phase in enumerate(found.phases):
        if not ends[i] < phase.first <= phase.last or phase.first != ends[i] + 1:
            raise _Broken(f"{at}.phases[{i}]", data["phases"][i], "points after those before it")
    for i, series in enumerate(found.parts):
        if len(series.bytes) != found.points:
            expected = f"a whole number for each of {found.points} points"
            raise _Broken(f"{at}.parts[{i}].bytes", len(series.bytes), expected)
    return found


def _series(data: Any, at: str) -> Series:
    kind, name = _one_of(KINDS, _of(data, "kind", at), f"{at}.kind"), _of(data, "name", at)
    return Series(kind, _text(name, f"{at}.name"), _list(data, "bytes", at, _size))


def _phase(data: Any, at: str) -> Phase:
    name = _one_of(_PHASES, _of(data, "name", at), f"{at}.name")
    loop = _flag(_of(data, "loop", at), f"{at}.loop")
    return Phase(name, loop, *(_size(_of(data, k, at), f"{at}.{k}") for k in ("first", "last")))


def _moved(data: Any, at: str) -> Moved:
    name, how = _text(_of(data, "name", at), f"{at}.name"), _of(data, "how", at)
    flags = (_flag(_of(data, key, at), f"{at}.{key}") for key in ("to_host", "in_loop"))
    sizes = (_size(_of(data, key, at), f"{at}.{key}") for key in ("bytes", "beside", "count"))
    to_host, in_loop = flags
    return Moved(name, to_host, _one_of(tuple(HOW), how, f"{at}.how"), in_loop, *sizes)


def _of(data: Any, name: str, at: str) -> Any:
    if not isinstance(data, dict):
        raise _Broken(at or "(the whole file)", data, "an object")
    return data.get(name)


def _list(data: Any, name: str, at: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    value = _of(data, name, at)
    if not isinstance(value, list):
        raise _Broken(f"{at}.{name}", value, "a list")
    return tuple(read(one, f"{at}.{name}[{i}]") for i, one in enumerate(value))


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise _Broken(at, value, "a text")
    return value


def _flag(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise _Broken(at, value, "true or false")
    return value


def _one_of(words: tuple[str, ...], value: Any, at: str) -> str:
    if value not in words:
        raise _Broken(at, value, f"one of {', '.join(words)}")
    return value


def _size(value: Any, at: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _Broken(at, value, "a whole number of at least 0")
    return value
