"""When a run saves, and when a signal ends it: after the same step in all of its processes.

The first process announces after which step all processes agree again. The alternatives are an
agreement after every step, which would delay short steps, and an agreement by each process's own
clock, which fails because no two clocks agree on when a second is over. So the first process
converts its clock into a number of steps, and all processes count the same steps.
"""

import time
from collections.abc import Callable

from jaxmem._target.processes.channel import Channel
from jaxmem._target.processes.signals import StopRequest

PERIOD, MOST_STEPS = 1.0, 100  # seconds and the most steps between two agreements


class Pace:
    """Tells after each step whether to save, and whether to end.

    processes: the processes that train together.
    asked: the signals that this process got.
    save_every: seconds between two checkpoints, by the first process's clock.
    clock: returns seconds.

    A process that is alone asks its clock and its signals after each step. Several agree about once
    a second: the first process's clock decides the step of the next agreement, so that all stop
    there.
    """

    def __init__(
        self,
        processes: Channel,
        asked: StopRequest,
        save_every: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._processes, self._asked, self._save_every = processes, asked, save_every
        self._clock = clock
        self.ended: int | None = None  # the signal that ends the run
        self._saved = self._agreed = self._clock()
        self._last = self._next = 0  # the steps of the last and the next agreement

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        if self._processes.alone:
            self.ended = self._asked.number
            return self._is_late()
        # A run that went back comes by earlier steps again.
        return not self._last < step < self._next and self.agree(step)

    def saved(self) -> None:
        """Begins to count the seconds to the next checkpoint."""
        self._saved = self._clock()

    def agree(self, step: int) -> bool:
        """Agrees as after a step, at any step after which all processes call it."""
        mine = lambda: [self._asked.number, self._is_late(), self._gap(step)]
        found = self._processes.agreed(mine)
        self.ended = next((number for number, *_ in found if number is not None), None)
        _, is_late, gap = found[0]
        self._last, self._next, self._agreed = step, step + gap, self._clock()
        return is_late

    def _is_late(self) -> bool:
        """Whether it is time for the next checkpoint."""
        return self._clock() - self._saved >= self._save_every

    def _gap(self, step: int) -> int:
        """In how many steps to agree again: not many more than the last time, since steps may begin
        to take longer.
        """
        done, seconds = step - self._last, self._clock() - self._agreed
        wanted = min(PERIOD, self._save_every) * done / max(seconds, 1e-9)
        return max(1, min(int(wanted), 2 * done, MOST_STEPS))
