"""A call of the user's function as a function of arrays: whatever it takes, returns or changes."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem._jax.jaxpr import ClosedJaxpr


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
        arguments = modules.merged(jax.tree.unflatten(tree, [given[i] for i in range(len(leaves))]))
        own, named = arguments
        result = function(*own, **named)
        found, shape = jax.tree.flatten((result, modules.changed(arguments)))
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
    # NumPy's numbers are none: an argument that jit takes as static may be one.
    return isinstance(leaf, jax.Array | np.ndarray) or hasattr(leaf, "aval")


class _Modules:
    """Arguments, as a tree of arrays. Flax's NNX modules among them are split into their arrays,
    since the function may change them; a tree without one is taken as it is.
    """

    def __init__(self, state):
        self.state = state

    @staticmethod
    def of(arguments) -> "_Modules":
        nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
        is_module = lambda x: nnx is not None and isinstance(x, nnx.Module)
        leaves, tree = jax.tree.flatten(arguments, is_leaf=is_module)
        if any(map(is_module, leaves)):
            return _NNX(nnx, leaves, [is_module(leaf) for leaf in leaves], tree)
        return _Modules(arguments)

    def merged(self, state):
        """The arguments with the arrays of `state`."""
        return state

    def changed(self, arguments):
        """The arrays of modules, after the function had `arguments`."""
        return None

    def update(self, changed) -> None:
        """Puts what the function changed into the user's own modules."""


class _NNX(_Modules):
    def __init__(self, nnx, leaves: list, is_module: list[bool], tree):
        self._nnx, self._is_module, self._tree = nnx, is_module, tree
        self._modules = [leaf for leaf, one in zip(leaves, is_module) if one]
        # split together, since modules may share arrays
        self._graph, arrays = nnx.split(self._modules)
        super().__init__((arrays, [leaf for leaf, one in zip(leaves, is_module) if not one]))

    def merged(self, state):
        arrays, others = state
        modules, others = iter(self._nnx.merge(self._graph, arrays)), iter(others)
        leaves = [next(modules) if one else next(others) for one in self._is_module]
        return jax.tree.unflatten(self._tree, leaves)

    def changed(self, arguments):
        is_module = lambda x: isinstance(x, self._nnx.Module)
        leaves = jax.tree.leaves(arguments, is_leaf=is_module)
        return self._nnx.state([leaf for leaf in leaves if is_module(leaf)])

    def update(self, changed) -> None:
        self._nnx.update(self._modules, changed)
