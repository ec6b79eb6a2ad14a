"""Waits until all processes of a run have started, before JAX connects them.

Without this, the processes wait in JAX for a process that was lost before it joined: by default
for 300 seconds, after which JAX aborts each of them with a stack trace that names no process. Here
process 0 listens at its address, and each other process reports its number. Once all have come, or
the time has ended, process 0 tells all, and leaves the port to JAX.
"""

import contextlib
import re
import selectors
import socket
import sys
import time

from experiments.command.address import Address
from experiments.errors import AbsentError, InputError

HELLO = re.compile(rb"jaxmem: process (\d+) of (\d+)\n")
GO, ABSENT, WRONG = "go", "absent", "wrong"  # the answers of process 0
SHOWN = 10.0  # seconds between two lines about the processes that have not come
TRY, PAUSE = 5.0, 0.2  # seconds of an attempt to connect, and between two attempts
LISTED = 8  # number of processes that a message names


def meet(place: Address) -> None:
    """Returns once all processes of the run have started. Raises AbsentError in every process that
    has started if one is missing after `place.wait` seconds.
    """
    if place.count > 1:
        (_gather if place.number == 0 else _report)(place)


class _Clock:
    """The time of a process, and a line about its wait now and then."""

    def __init__(self, seconds: float):
        self.seconds, self.began = seconds, time.monotonic()
        self.shown = SHOWN

    @property
    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()

    def show(self, awaited: str) -> None:
        passed = self.seconds - self.left
        if passed >= self.shown:
            self.shown += SHOWN
            said = f"waiting for {awaited}: {passed:.0f} of {self.seconds:g} s"
            print(said, file=sys.stderr, flush=True)


def _gather(place: Address) -> None:
    """Waits as process 0 until all others have reported, and answers them."""
    clock = _Clock(place.wait)
    present: dict[socket.socket, int] = {}
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as watch:
        listener = opened.enter_context(_listener(place))
        watch.register(listener, selectors.EVENT_READ)
        try:
            while absent := sorted({*range(1, place.count)} - {*present.values()}):
                awaited = f"{_names(absent)} of {place.count} at {place.coordinator}"
                if clock.left <= 0:
                    raise AbsentError(
                        f"{_names(absent)} of {place.count} did not reach process 0 at"
                        f" {place.coordinator} in {place.wait:g} s; expected: all processes; read"
                        f" the output of {_names(absent)}, check that the network leads to"
                        f" {place.coordinator}, and start all processes again, or give them more"
                        " time by --wait SECONDS"
                    )
                clock.show(awaited)
                for key, _ in watch.select(max(0.0, min(clock.left, 1.0))):
                    if key.fileobj is listener:
                        with contextlib.suppress(OSError):  # the caller has left
                            caller = opened.enter_context(listener.accept()[0])
                            caller.setblocking(False)
                            watch.register(caller, selectors.EVENT_READ)
                    else:
                        _hear(key.fileobj, place, present, watch)  # pyright: ignore[reportArgumentType]
        except (AbsentError, InputError) as error:
            kind = ABSENT if isinstance(error, AbsentError) else WRONG
            _answer(present, f"{kind}: {error}")
            raise
        listener.close()
        _answer(present, GO)


def _hear(
    caller: socket.socket, place: Address, present: dict, watch: selectors.BaseSelector
) -> None:
    """Notes the number of a caller. A caller that has ended, or is no process of a run, leaves."""
    try:
        found = HELLO.fullmatch(caller.recv(64))
    except OSError:
        found = None
    if found is None:
        present.pop(caller, None)
        watch.unregister(caller)
        caller.close()
        return
    number, count = map(int, found.groups())
    doubled = number in present.values() or number == 0
    present[caller] = number
    if count != place.count:
        raise InputError(
            f"--processes: got {count} of process {number}, and {place.count} of process 0;"
            " allowed: one number for all processes"
        )
    if doubled:
        raise InputError(
            f"--process: got {number} of two processes; allowed: a number of its own for each"
        )


def _answer(present: dict[socket.socket, int], answer: str) -> None:
    for caller in present:
        with contextlib.suppress(OSError):  # it has ended
            caller.sendall(f"{answer}\n".encode())


def _listener(place: Address) -> socket.socket:
    """A socket that listens at the port of process 0 in all networks of its host, as JAX does."""
    port = int(place.coordinator.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        made = socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=128 + place.count
        )
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--coordinator: got {place.coordinator}, and process 0 cannot use port {port} of its"
            f" host: {error}; allowed: a free port"
        ) from error
    made.setblocking(False)
    return made


def _report(place: Address) -> None:
    """Reports the number of this process to process 0, and waits for the answer."""
    clock, why = _Clock(place.wait), "no answer"
    while clock.left > 0:
        try:
            answer = _asked(place, min(TRY, clock.left))
        except OSError as error:
            why = str(error)
        else:
            kind, _, reason = answer.partition(": ")
            if kind == GO:
                _await_jax(place)
                return
            if kind in (ABSENT, WRONG):
                raise (AbsentError if kind == ABSENT else InputError)(reason)
            why = "another program answered" if answer else "process 0 ended"
        clock.show(f"process 0 at {place.coordinator} ({why})")
        time.sleep(PAUSE)
    raise AbsentError(
        f"process 0 did not answer process {place.number} of {place.count} at {place.coordinator}"
        f" in {place.wait:g} s ({why}); expected: process 0 there; read the output of process 0,"
        f" check that the network leads to {place.coordinator}, and start all processes again, or"
        " give them more time by --wait SECONDS"
    )


def _asked(place: Address, seconds: float) -> str:
    """Returns the answer of process 0, "" if it ends first. Process 0 may have begun just now, and
    waits as long as this process.
    """
    with _connected(place, seconds) as line:
        line.sendall(f"jaxmem: process {place.number} of {place.count}\n".encode())
        line.settimeout(place.wait + TRY)
        return line.makefile(encoding="utf-8", errors="replace").readline().removesuffix("\n")


def _connected(place: Address, seconds: float) -> socket.socket:
    host, _, port = place.coordinator.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)


def _await_jax(place: Address) -> None:
    """Waits until process 0 listens again, by JAX: JAX itself would try again after a second."""
    end = time.monotonic() + TRY
    while time.monotonic() < end:
        with contextlib.suppress(OSError), _connected(place, PAUSE):
            return
        time.sleep(PAUSE / 10)


def _names(numbers: list[int]) -> str:
    """`process 3`, `processes 1, 2`, or the first of them and the number of the others."""
    listed = ", ".join(map(str, numbers[:LISTED]))
    more = f" and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
    return f"process{'es' * (len(numbers) > 1)} {listed}{more}"
