"""A step whose state holds that of a released step beside other arrays, such as a counter."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Within:
    """`step(state, *args)`, called as the function is that it was made of; its states are placed as
    those of the released step in it.

    released: the released step that `step` calls.
    step: the function.
    get: `get(state)` is the pair that the released step takes.
    put: `put(state, pair)` is the state with that pair in place of its own.
    """

    released: Any
    step: Callable
    get: Callable[[Any], tuple[Any, Any]]
    put: Callable[[Any, tuple[Any, Any]], Any]

    def __call__(self, state, *args, **named):
        return self.step(state, *args, **named)

    def split(self, state, persist: int, **where):
        """The state with its pair where `ReleasedStep.split` puts it, whose arguments and errors
        these are.
        """
        return self.put(state, self.released.split(self.get(state), persist, **where))

    def joined(self, state):
        """The state with its pair as `ReleasedStep.joined` makes it, whose errors are raised."""
        return self.put(state, self.released.joined(self.get(state)))


def opened(step) -> tuple[Any, Callable[[Any], Any]]:
    """The released step in what a `build` returned, and what takes its pair out of a state."""
    if isinstance(step, Within):
        return step.released, step.get
    return step, lambda state: state
