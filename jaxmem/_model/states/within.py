"""A step whose state holds that of a released step beside other arrays, such as a counter."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Within:
    """A training step that calls a released step, and whose state holds more arrays.

    `Within` is called like the wrapped function. `split` and `joined` place the states of the
    released step.

    released: the released step that `step` calls.
    step: the wrapped function.
    get: `get(state)` returns the pair that the released step receives.
    put: `put(state, pair)` returns the state with `pair` in place of its own pair.
    """

    released: Any
    step: Callable
    get: Callable[[Any], tuple[Any, Any]]
    put: Callable[[Any, tuple[Any, Any]], Any]

    def __call__(self, state, *args, **named):
        return self.step(state, *args, **named)

    def split(self, state, persist: int, **where):
        """Returns the state with its pair placed by `ReleasedStep.split`.

        state: the state of the wrapped function.
        persist: number of layers, the first ones, whose states are stored in device memory.
        where: the other arguments of `ReleasedStep.split`.

        Raises the errors of `ReleasedStep.split`.
        """
        return self.put(state, self.released.split(self.get(state), persist, **where))

    def joined(self, state):
        """Returns the state with its pair joined by `ReleasedStep.joined`.

        Raises the errors of `ReleasedStep.joined`.
        """
        return self.put(state, self.released.joined(self.get(state)))


def opened(step) -> tuple[Any, Callable[[Any], Any]]:
    """The released step in what a `build` returned, and what takes its pair out of a state."""
    if isinstance(step, Within):
        return step.released, step.get
    return step, lambda state: state
