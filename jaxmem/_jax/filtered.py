"""A step whose arguments hold more than arrays, such as an Equinox module its activation function,
as `jax.jit` takes it: what is no array belongs to the program.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmem.errors import StepError

_SCALARS = (bool, int, float, complex)


def is_array(leaf) -> bool:
    """Whether a leaf is an array, a tracer, or the shape of an array."""
    arrays = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    return isinstance(leaf, arrays) or hasattr(leaf, "aval")


def takes_more_than_arrays(args: tuple) -> bool:
    """Whether `jax.jit` would refuse the arguments."""
    return not all(is_array(leaf) or isinstance(leaf, _SCALARS) for leaf in jax.tree.leaves(args))


@dataclasses.dataclass(frozen=True)
class _Tree:
    """A tree divided into its arrays, as a tree with None elsewhere, and the rest of its leaves.

    Numbers of Python's own are no arrays here: a module's may decide what it computes.
    """

    structure: Any
    rest: tuple

    @staticmethod
    def of(tree) -> tuple[Any, "_Tree"]:
        leaves, structure = jax.tree.flatten(tree)
        arrays = [leaf if is_array(leaf) else None for leaf in leaves]
        rest = tuple(None if is_array(leaf) else leaf for leaf in leaves)
        return jax.tree.unflatten(structure, arrays), _Tree(structure, rest)

    def filled(self, arrays):
        """The tree again, of its arrays."""
        leaves = self.structure.flatten_up_to(arrays)
        pairs = zip(leaves, self.rest)
        return jax.tree.unflatten(self.structure, [a if r is None else r for a, r in pairs])


class Filtered:
    """A step to trace, compile and call with such arguments. The arrays of the first argument are
    donated, as those of a plain function's are.
    """

    def __init__(self, step: Callable):
        self._step = step

    def trace(self, *args) -> "FilteredStage":
        arrays, given = _Tree.of(args)
        returned: list[_Tree] = []

        def step(*arrays):
            out, rest = _Tree.of(self._step(*given.filled(arrays)))
            returned.append(rest)
            return out

        traced = jax.jit(step, donate_argnums=0 if args else ()).trace(*arrays)
        return FilteredStage(traced, given, returned[-1])


@dataclasses.dataclass(frozen=True)
class FilteredStage:
    """A traced step, and in time a lowered and a compiled one.

    traced: JAX's own stage.
    given, returned: what of the arguments and of the result is no array.
    """

    traced: Any
    given: _Tree
    returned: _Tree

    def lower(self) -> "FilteredLowered":
        return FilteredLowered(self.traced.lower(), self.given, self.returned)


@dataclasses.dataclass(frozen=True)
class FilteredLowered:
    lowered: Any
    given: _Tree
    returned: _Tree

    def compile(self, compiler_options=None) -> "FilteredStep":
        return FilteredStep(self.lowered.compile(compiler_options), self.given, self.returned)


@dataclasses.dataclass(frozen=True)
class FilteredStep:
    """The executable, called as the step is. Raises StepError where what is no array has changed
    since it was compiled.
    """

    compiled: Any
    given: _Tree
    returned: _Tree

    def __call__(self, *args):
        arrays, given = _Tree.of(args)
        if given != self.given:
            raise StepError(
                "Plan.step: an argument differs in something that is no array (a function, a"
                " number, a module's structure) from what the step was compiled for; make the plan"
                " anew with these arguments, or give numbers that change as arrays"
            )
        return self.returned.filled(self.compiled(*arrays))
