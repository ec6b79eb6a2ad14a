"""The notes of a checkpoint about data and settings. An iterator of data has a position. Data that
are a function of the step's number have none.
"""

import base64
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem._target.processes.channel import Channel
from jaxmem.errors import RunError


def as_json(value: Any, what: str) -> Any:
    """`value`, if it survives a round trip through JSON. Otherwise raises RunError, which begins
    with `what`.
    """
    try:
        back = json.loads(json.dumps(value, allow_nan=False))
        why = "" if back == value else f"; JSON gives {back!r} for it"
    except (TypeError, ValueError) as error:
        back, why = None, f" ({error})"
    if why:
        raise RunError(
            f"train: {what} {value!r}, which a checkpoint cannot hold{why}; expected bytes or what"
            " JSON has words for: finite numbers, texts, lists, and dicts with texts as keys"
        )
    return back


def check_settings(was: Mapping[str, Any], now: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Raises RunError, which names the first setting that differs, if settings differ."""
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            raise RunError(
                f"train: {str(folder)!r} holds an unfinished run with {name} ="
                f" {was.get(name)!r}, and it is {now.get(name)!r} now; expected the settings that"
                " the run began with, another folder, or overwrite=True (--overwrite on a command"
                " line), which begins again"
            )


class Data:
    """The batches of a run. `data(number)` returns the batch of step `number`. Steps are requested
    in order, from 1.

    source: a function of the number, or an iterator with `get_state` and `set_state`, such as
      grain's. Raises RunError for anything else.
    processes: the processes of the run. Each process has an iterator of its own.
    """

    def __init__(self, source: Callable[[int], Any] | Any, processes: Channel | None = None):
        self._processes = processes or Channel()
        self._iterates = hasattr(source, "get_state") and hasattr(source, "set_state")
        if not self._iterates and not callable(source):
            raise RunError(
                f"train: `data` is {type(source).__name__}; expected a function of the step's"
                " number, or an iterator with get_state() and set_state(), which a run needs to go"
                " on where it stopped"
            )
        self._source: Any = source

    def __call__(self, number: int) -> Any:
        if not self._iterates:
            return self._source(number)
        try:
            return next(self._source)
        except StopIteration:
            raise RunError(
                f"train: `data` ended before step {number}; expected a batch for every step, such"
                " as of data that repeat"
            ) from None

    @property
    def position(self) -> Any:
        """The positions of the iterators of all processes, as JSON; None if the data are a
        function.
        """
        if not self._iterates:
            return None
        each = self._processes.agreed(self._position)
        return each[0] if all(one == each[0] for one in each) else {"each": each}

    def _position(self) -> Any:
        """The position of this process's iterator, as a value of JSON."""
        state = self._source.get_state()
        if isinstance(state, bytes):
            return {"bytes": base64.b64encode(state).decode()}
        return {"json": as_json(state, "data.get_state() returned")}

    def go(self, position: Any) -> None:
        """Sets the iterators to a position that `position` returned."""
        if (position is None) == self._iterates:
            raise RunError(
                f"train: the checkpoint has {'no' if position is None else 'a'} position of data,"
                f" and `data` is {'an iterator' if self._iterates else 'a function'}; expected data"
                " of the kind that the run began with"
            )
        if position is not None and "each" in position:
            each = position["each"]
            if len(each) != self._processes.count:
                raise RunError(
                    f"train: the checkpoint has positions of data in {len(each)} processes, and"
                    f" there are {self._processes.count}; expected as many, or data that are a"
                    " function of the step's number"
                )
            position = each[self._processes.index]
        if position is not None:
            is_bytes = "bytes" in position
            state = base64.b64decode(position["bytes"]) if is_bytes else position["json"]
            self._source.set_state(state)
