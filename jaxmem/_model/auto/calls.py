"""A call of the user's function as a function of arrays. The user's function may take, return and
change any objects.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem._core.lists import merged, separated
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._trace.filtered import Tree, is_array
from jaxmem._trace.jaxpr import ClosedJaxpr


def traced(
    function: Callable, args: tuple, kwargs: dict
) -> tuple[ClosedJaxpr, Callable[[Callable[[list], Sequence]], Any]]:
    """Traces the call `function(*args, **kwargs)`. Arguments that are not arrays are passed
    unchanged.

    Returns the trace, from the arrays among the arguments to the arrays among the results; and
    `call(run)`, which returns the result of the call. `run` computes the arrays of the result from
    a list of the arrays among the arguments. `call` also updates the modules that the function
    changes (batch statistics, counts of random keys).
    """
    modules = _Modules.of((args, kwargs))
    (args, kwargs), given = Tree.of(modules.state, _arrays)
    returned: list[Tree] = []

    def pure(*args, **kwargs):
        own, named = arguments = modules.merged(given.filled((args, kwargs)))
        result = function(*own, **named)
        out, rest = Tree.of((result, modules.changed(arguments)), _arrays)
        returned.append(rest)
        return out

    with todays_checkpoint():
        closed = jax.make_jaxpr(modules.called_like(function, pure))(*args, **kwargs)

    def call(run: Callable[[list], Sequence]):
        result, changed = returned[-1].filled(run(jax.tree.leaves((args, kwargs))))
        modules.update(changed)
        return result

    return closed, call


def _arrays(tree) -> list[bool]:
    """Returns for each leaf whether it is an array. A NumPy scalar does not count as an array: it
    may be a static argument of `jax.jit`.
    """
    return [is_array(a) and not isinstance(a, np.generic) for a in jax.tree.leaves(tree)]


class _Modules:
    """Arguments and keywords, as a tree of arrays. Flax's NNX modules are split into their arrays,
    since the function may change the modules. A tree without modules is not changed.
    """

    def __init__(self, state):
        self.state = state

    @staticmethod
    def of(arguments) -> "_Modules":
        nnx = sys.modules.get("flax.nnx")  # imported, if an argument is a module
        is_module = lambda x: nnx is not None and isinstance(x, nnx.Module)
        leaves, tree = jax.tree.flatten(arguments, is_leaf=is_module)
        if any(map(is_module, leaves)):
            return _NNX(nnx, leaves, [is_module(leaf) for leaf in leaves], tree)
        return _Modules(arguments)

    def called_like(self, function: Callable, pure: Callable) -> Callable:
        """Returns `pure`, a function of `state`, with the parameter names of the user's function,
        so that JAX's errors have the path of an argument.
        """
        return functools.wraps(function, updated=())(pure)

    def merged(self, state):
        """Returns the arguments with the arrays of `state`."""
        return state

    def changed(self, arguments):
        """Returns the arrays of the modules in `arguments` after the call."""
        return None

    def update(self, changed) -> None:
        """Updates the user's own modules with the arrays `changed`."""


class _NNX(_Modules):
    def __init__(self, nnx, leaves: list, is_module: list[bool], tree):
        self._nnx, self._is_module, self._tree = nnx, is_module, tree
        self._modules, others = separated(leaves, is_module)
        # split together, since modules may share arrays
        self._graph, arrays = nnx.split(self._modules)
        super().__init__(((arrays, others), {}))

    def called_like(self, function: Callable, pure: Callable) -> Callable:
        return lambda modules, others: pure(modules, others)

    def merged(self, state):
        (arrays, others), _ = state
        modules = self._nnx.merge(self._graph, arrays)
        return jax.tree.unflatten(self._tree, merged((modules, others), self._is_module))

    def changed(self, arguments):
        is_module = lambda x: isinstance(x, self._nnx.Module)
        leaves = jax.tree.leaves(arguments, is_leaf=is_module)
        return self._nnx.state([leaf for leaf in leaves if is_module(leaf)])

    def update(self, changed) -> None:
        self._nnx.update(self._modules, changed)
