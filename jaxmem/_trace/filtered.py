"""A step whose arguments hold more than arrays, in the form that `jax.jit` takes. An Equinox module
holds its activation function, for example. Every leaf that is no array is a part of the program.
"""

import dataclasses
import functools
import sys
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


def traced_leaves(tree) -> list[bool]:
    """For each leaf of an argument, whether it is traced; the others are static.

    Numbers of Python's own are traced, as by `jax.jit`: a learning rate, or the step counter of an
    optax state or a Flax train state, may change between calls. In an Equinox module they are
    static, as for `eqx.filter_jit`: there a number may decide what the module computes, as
    `eqx.nn.Dropout.inference` does, and parameters are arrays.
    """
    equinox = sys.modules.get("equinox")  # whoever has a module has imported it
    is_module = lambda x: equinox is not None and isinstance(x, equinox.Module)
    return [
        is_array(leaf) or (isinstance(leaf, _SCALARS) and not is_module(part))
        for part in jax.tree.leaves(tree, is_leaf=is_module)
        for leaf in jax.tree.leaves(part)
    ]


def is_nnx_object(x) -> bool:
    """Whether `x` is an object of Flax NNX that a step may change: a module, an optimizer, random
    streams, a metric, or a variable.
    """
    nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def jitted_for(arguments, step: Callable, **options):
    """The step under the jit that its arguments need: `nnx.jit` for objects of Flax NNX that the
    step may change, `Filtered` for arguments with other leaves than arrays, else `jax.jit`. An
    `nnx.State` is an argument like other trees.

    arguments: a tree of the dynamic arguments.
    options: options of that jit.
    """
    nnx = sys.modules.get("flax.nnx")
    is_part = lambda x: is_nnx_object(x) or (nnx is not None and isinstance(x, nnx.State))
    if nnx is not None and any(map(is_nnx_object, jax.tree.leaves(arguments, is_leaf=is_part))):
        return nnx.jit(step, **options)
    if not all(traced_leaves(arguments)):  # `jax.jit` cannot take static leaves
        return Filtered(step, **options)
    return jax.jit(step, **options)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree without its traced leaves.

    structure: the tree's.
    static: by position the leaves that are not traced.
    types: the types of these leaves, since 1, 1.0 and True are equal.
    """

    structure: Any
    static: tuple[tuple[int, Any], ...]
    types: tuple[type, ...]

    @staticmethod
    def of(tree, traced: Callable[[Any], list[bool]] = traced_leaves) -> tuple[Any, "Tree"]:
        """The tree with None for its static leaves, and those leaves.

        traced: says for each leaf of a tree whether it is traced.
        """
        leaves, structure = jax.tree.flatten(tree)
        which = traced(tree)
        arrays = [leaf if one else None for leaf, one in zip(leaves, which)]
        static = tuple((i, leaf) for i, leaf in enumerate(leaves) if not which[i])
        types = tuple(type(leaf) for _, leaf in static)
        return jax.tree.unflatten(structure, arrays), Tree(structure, static, types)

    def filled(self, arrays):
        """The whole tree.

        arrays: the traced leaves in their order, as a list or as a tree.
        """
        left, static = iter(jax.tree.leaves(arrays)), dict(self.static)
        count = self.structure.num_leaves
        leaves = [static[i] if i in static else next(left) for i in range(count)]
        return jax.tree.unflatten(self.structure, leaves)

    def difference(self, before: "Tree") -> str:
        """The first static leaf that differs from the leaf before, with its path, or another
        difference. The tree is a pair of positional arguments and keyword arguments.
        """
        if self.structure != before.structure:
            return "the structure of `args` and `kwargs`"
        numbers = jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        named = lambda path: ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        paths = [named(p) for p, _ in jax.tree_util.tree_leaves_with_path(numbers)]
        for i, leaf in self.static:
            was = dict(before.static).get(i, "an array")
            if (type(leaf), leaf) != (type(was), was):
                return f"`{paths[i]}` is {leaf!r}, and was {was!r}"
        return "another leaf of the arguments is an array"


class Filtered:
    """A step to trace, compile and call with such arguments.

    step: the function.
    options: the options of its jit: `donate_argnums` and `donate_argnames`.

    Raises StepError for another option.
    """

    def __init__(self, step: Callable, **options: Any):
        if wrong := sorted({*options} - {"donate_argnums", "donate_argnames"}):
            raise StepError(
                f"jit: got the option `{wrong[0]}`, and the arguments hold more than arrays (an"
                " Equinox module, a text); expected donate_argnums or donate_argnames alone."
                " Functions, texts and a module's numbers are static already; bind another static"
                " number by functools.partial"
            )
        self._step, self._options = step, options

    def __call__(self, *args, **kwargs):
        """Calls the step inside another trace. Outside of a trace, each call compiles it."""
        jitted, arrays, _, returned = self._jitted(args, kwargs)
        out = jitted(*arrays[0], **arrays[1])
        return returned[-1].filled(out)

    def trace(self, *args, **kwargs) -> "FilteredStage":
        jitted, arrays, given, returned = self._jitted(args, kwargs)
        traced = jitted.trace(*arrays[0], **arrays[1])
        return FilteredStage(traced, given, returned[-1])

    def _jitted(self, args: tuple, kwargs: dict) -> tuple[Any, tuple, Tree, list[Tree]]:
        """The step as a jitted function of arrays, the arrays, and the static leaves of the
        arguments and, once the function is traced, of the result.
        """
        arrays, given = Tree.of((args, kwargs))
        returned: list[Tree] = []

        @functools.wraps(self._step, updated=())  # JAX's errors then name the user's parameters
        def step(*arrays, **named):
            args, kwargs = given.filled((arrays, named))
            out, rest = Tree.of(self._step(*args, **kwargs))
            returned.append(rest)
            return out

        return jax.jit(step, **self._options), arrays, given, returned

    def lower(self, *args, **kwargs) -> "FilteredStage":
        return self.trace(*args, **kwargs).lower()


@dataclasses.dataclass(frozen=True)
class FilteredStage:
    """A step that is traced, then lowered, then compiled. A compiled one is called as the step is.

    stage: JAX's own stage.
    given, returned: the static leaves of the arguments and of the result.
    """

    stage: Any
    given: Tree
    returned: Tree

    @property
    def traced(self) -> Any:
        """JAX's own traced stage, by the name that `nnx.jit` gives it."""
        return self.stage

    compiled = traced

    def lower(self) -> "FilteredStage":
        return dataclasses.replace(self, stage=self.stage.lower())

    def compile(self, compiler_options=None) -> "FilteredStage":
        return dataclasses.replace(self, stage=self.stage.compile(compiler_options))

    def __call__(self, *args, **kwargs):
        """Raises StepError where a static leaf has changed since the step was compiled."""
        (arrays, named), given = Tree.of((args, kwargs))
        if given != self.given:
            raise StepError(
                "Plan.step: an argument differs in something that is no array (a function, a"
                " number, a module's structure) from what the step was compiled for:"
                f" {given.difference(self.given)}; make the plan anew with these arguments,"
                " or give numbers that change as arrays"
            )
        return self.returned.filled(self.stage(*arrays, **named))
