"""A piece of a traced program that can be run, compiled and timed by itself."""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to be timed as one fused program.

    function: takes arrays, and returns arrays in any container.
    avals: shapes and dtypes of its arguments.
    """

    function: Callable
    avals: tuple

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of its arguments, without what else an aval holds."""
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.avals]

    def trace(self) -> jax.stages.Traced:
        """The traced function, to compile."""
        return jax.jit(self.function).trace(*self.specs)
