"""A call of the user's function as a function of arrays: whatever it takes, returns or changes."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Call:
    """A traced call: `closed` from the arrays among its arguments to those that it returns.

    arrays: the arrays among the arguments.
    returned: from the results of `closed` to what the function returns; modules that it changes
      (batch statistics, counts of random keys) are changed by it.
    """

    closed: ClosedJaxpr
    arrays: list
    returned: Callable[[Sequence], Any]


def traced(function: Callable, args: tuple, kwargs: dict) -> Call:
    """The call `function(*args, **kwargs)`. What is no array is taken as it is."""
    modules = _Modules.of((args, kwargs))
    leaves, tree = jax.tree.flatten(modules.state)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    rest = dict(enumerate(leaves))
    returned: list = []

    def pure(*arrays):
        given = dict(rest) | dict(zip(places, arrays))
        call = modules.merged(jax.tree.unflatten(tree, [given[i] for i in range(len(leaves))]))
        (own, named) = call
        result = function(*own, **named)
        found, shape = jax.tree.flatten((result, modules.changed(call)))
        static = {i: leaf for i, leaf in enumerate(found) if not _is_array(leaf)}
        returned.append((shape, static, len(found)))
        return [leaf for i, leaf in enumerate(found) if i not in static]

    arrays = [leaves[i] for i in places]
    closed = jax.make_jaxpr(pure)(*arrays)
    shape, static, count = returned[-1]

    def rebuilt(results: Sequence):
        left = iter(results)
        found = [static[i] if i in static else next(left) for i in range(count)]
        result, changed = jax.tree.unflatten(shape, found)
        modules.update(changed)
        return result

    return Call(closed, arrays, rebuilt)


def _is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic) or hasattr(leaf, "aval")


class _Modules:
    """Arguments, as a tree of arrays. Flax's NNX modules are split, since the function may change
    them; without one, a tree is taken as it is.
    """

    def __init__(self, state):
        self.state = state

    @staticmethod
    def of(arguments) -> "_Modules":
        nnx = sys.modules.get("flax.nnx")
        is_module = lambda x: nnx is not None and isinstance(x, nnx.Module)
        if any(map(is_module, jax.tree.leaves(arguments, is_leaf=is_module))):
            return _NNX(arguments)
        return _Modules(arguments)

    def merged(self, state):
        return state

    def changed(self, arguments):
        return None

    def update(self, changed) -> None:
        pass


class _NNX(_Modules):
    def __init__(self, arguments):
        from flax import nnx

        self._nnx, self._arguments = nnx, arguments
        self._graph, state = nnx.split(arguments)
        super().__init__(state)

    def merged(self, state):
        return self._nnx.merge(self._graph, state)

    def changed(self, arguments):
        return self._nnx.state(arguments)

    def update(self, changed) -> None:
        self._nnx.update(self._arguments, changed)
