"""Messages between the processes of a run, sent through the coordinator of `jax.distributed`.

Processes agree through the coordinator, not through their devices. The alternative is a collective
on the devices. A collective would wait for the step that runs, and the thread that writes a
checkpoint may not call one. A thread can send messages to the coordinator while the next step runs.

A process that fails may send its error in place of any message. So all processes receive the error
at the point where they wait, and also where orbax makes them wait for each other.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxmem._target.processes.orbax import orbax
from jaxmem.errors import RunError

T = TypeVar("T")
LONGEST = 1800.0  # seconds that a process waits for another's message
HURRIED = 30.0  # the same once it has failed
_MADE = itertools.count()  # channels; every process makes equal ones in the same order
_SLICE = 1.0  # seconds of a wait, between which signals are heard


def joined() -> "Channel":
    """A new channel of the processes that `jax.distributed` has joined; each process makes as many
    of them. Raises RunError where there are several, and orbax, which knows the way to the
    coordinator, is missing.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return Channel()
    client = orbax().multihost.get_jax_distributed_client()
    return Channel(jax.process_count(), jax.process_index(), f"jaxmem/{next(_MADE)}", client)


class Channel:
    """Exchanges values between processes, which call the same methods in the same order. A process
    that is alone computes its value and sends nothing.

    count, index: how many processes there are, and which of them this one is.
    name: of the channel, which no other has, and is the same in every process.
    client: the coordinator's, which holds values by keys; unused by a process that is alone.
    """

    def __init__(self, count: int = 1, index: int = 0, name: str = "", client: Any = None):
        self.count, self.index, self.name, self._client = count, index, name, client
        self._number, self._longest = 0, LONGEST

    def beside(self, name: str) -> "Channel":
        """Another channel of the same processes, for another thread."""
        return Channel(self.count, self.index, f"{self.name}/{name}", self._client)

    @property
    def alone(self) -> bool:
        return self.count == 1

    @property
    def first(self) -> bool:
        """Whether this process writes the files that only one process may write."""
        return self.index == 0

    def agreed(self, work: Callable[[], Any]) -> list:
        """What `work` returned in each process, as JSON. Where it raises in one, it raises in all:
        there its own error, in the others RunError with that one's text.
        """
        if self.alone:
            return [work()]
        try:
            mine = {"value": work()}
        except BaseException as error:
            self.leave(error)
            raise
        found = self._swapped(mine)
        for number, message in enumerate(found):
            if "error" in message:
                self.hurry()
                raise RunError(f"process {number} of {self.count} failed: {message['error']}")
        return [message["value"] for message in found]

    def each(self, work: Callable[[], T]) -> T:
        """What `work` returned in this process, of any type. Where it raises in one, all raise."""
        own: list[T] = []
        self.agreed(lambda: own.append(work()))
        return own[0]

    def first_does(self, work: Callable[[], Any]) -> Any:
        """What `work` returned in the first process, where alone it is called. Where it raises
        there, all raise.
        """
        return self.agreed(work if self.first else lambda: None)[0]

    def wait(self, longest: float) -> None:
        """Waits as many seconds for another's message from now on."""
        self._longest = longest

    def hurry(self) -> None:
        """Waits less long from now on, since this process or another has failed."""
        self._longest = HURRIED

    def leave(self, error: BaseException) -> None:
        """Tells the others, as they wait for this process's next message, that it has failed."""
        if self.alone:
            return
        self.hurry()
        message = {"error": str(error) or type(error).__name__}
        # What the others wait for, if it was about to gather their messages, and the next.
        for number in (self._number, self._number + 1):
            self._number = number
            with contextlib.suppress(RuntimeError):  # it was sent, or the coordinator is gone
                self._put(str(self.index), message)
            if self.first:
                with contextlib.suppress(RuntimeError):
                    self._put("all", [message, *[{"value": None}] * (self.count - 1)])

    def _swapped(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all. The first process gathers them, and sends them to all."""
        self._number += 1
        self._put(str(self.index), message)
        if not self.first:
            return self._received("all", "process 0")
        found = [message]
        for number in range(1, self.count):
            found.append(self._received(str(number), f"process {number}"))
        self._put("all", found)
        if self._number > 1:  # all have read those, since they sent these
            self._client.key_value_delete(f"{self.name}/{self._number - 1}")
        return found

    def _put(self, key: str, value: Any) -> None:
        """Sends a value under a key of the current exchange."""
        self._client.key_value_set(f"{self.name}/{self._number}/{key}", json.dumps(value))

    def _received(self, key: str, whose: str) -> Any:
        """Waits for another process's value. Raises RunError if it does not come in time."""
        began = time.monotonic()
        while True:
            try:
                at = f"{self.name}/{self._number}/{key}"
                return json.loads(self._client.blocking_key_value_get(at, int(1000 * _SLICE)))
            except jax.errors.JaxRuntimeError as error:
                late = time.monotonic() - began > self._longest
                if "DEADLINE_EXCEEDED" in str(error) and not late:
                    continue
                raise RunError(
                    f"{whose} of {self.count} does not answer ({error}); expected that every"
                    " process runs the same lines, and none has ended"
                ) from error
