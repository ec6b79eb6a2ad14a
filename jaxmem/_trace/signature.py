"""How a jitted function is called: its static arguments, a key of its arguments' shapes, and the
same call with positional arguments alone.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxmem._core.lists import separated
from jaxmem._trace.filtered import is_nnx_object, traced_leaves
from jaxmem._trace.settings import settings


class Signature:
    """The arguments of a function under options of `jax.jit`.

    function: the function, jitted or not.
    options: the options of jit. `static_argnums` and `static_argnames` are read.
    """

    def __init__(self, function: Callable, options: Mapping[str, Any]):
        numbers = _tuple(options.get("static_argnums"))
        names = set(_tuple(options.get("static_argnames")))
        parameters = _positional_names(function)
        # `jax.jit` finds the names of numbers, and the numbers of names, in the same way, and
        # neither if both are given.
        both = bool(numbers and names)
        if not both:
            names |= {parameters[i] for i in numbers if -len(parameters) <= i < len(parameters)}
        self._names, self._numbers = names, numbers
        self._positions = {i for i, name in enumerate(parameters) if name in names and not both}
        self.static = bool(numbers or names)

    def _is_static(self, count: int) -> list[bool]:
        """For each of `count` positional arguments, whether it is static."""
        static = self._positions | {i % count for i in self._numbers if -count <= i < count}
        return [i in static for i in range(count)]

    def dynamic(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments without the static ones."""
        _, left = separated(args, self._is_static(len(args)))
        return tuple(left), {k: v for k, v in kwargs.items() if k not in self._names}

    def key(self, args: tuple, kwargs: dict) -> Any:
        """A hashable key, equal for arguments that one compiled program serves."""
        dynamic = self.dynamic(args, kwargs)
        values, _ = separated(args, self._is_static(len(args)))
        # 1, 1.0 and True are equal, and may make the function compute different values.
        static = tuple((type(a), a) for a in values)
        named = {k: (type(v), v) for k, v in sorted(kwargs.items()) if k in self._names}
        arguments = _without_modules(dynamic)
        leaves, tree = jax.tree.flatten(arguments)
        traced = traced_leaves(arguments)
        leaf_keys = (_leaf_key(a) if one else (type(a), a) for a, one in zip(leaves, traced))
        return settings(), static, tuple(named.items()), tree, tuple(leaf_keys)

    def alike(self, *keys: Any) -> bool:
        """Whether keys are of one program apart from settings, shardings and weak types."""
        one, other = ((key[1:-1], [leaf[:2] for leaf in key[-1]]) for key in keys)
        return one == other

    def positional(self, args: tuple, kwargs: dict) -> tuple[tuple, Callable]:
        """The values of all arguments in one tuple, and a function that makes the jitted function
        into one of these values.
        """
        names, count = tuple(kwargs), len(args)

        def called(jitted):
            def call(method: str, values: tuple, _: dict):
                named = dict(zip(names, values[count:]))
                return getattr(jitted, method)(*values[:count], **named)

            return Adapted(jitted, call) if names else jitted

        return (*args, *kwargs.values()), called

    def shapes(self, values):
        """The values with shapes in place of arrays and of tracers, so that no memory is held."""
        return jax.tree.map(_shape, values, is_leaf=is_nnx_object)


class Adapted:
    """A jitted function that is called, traced and lowered through `call(method, args, kwargs)`,
    where the method is "__call__", "trace" or "lower". Its name and source are `function`'s.
    """

    def __init__(self, function, call: Callable[[str, tuple, dict], Any]):
        functools.update_wrapper(self, function, updated=())
        self._call = call

    def __call__(self, *args, **kwargs):
        return self._call("__call__", args, kwargs)

    def trace(self, *args, **kwargs):
        return self._call("trace", args, kwargs)

    def lower(self, *args, **kwargs):
        return self._call("lower", args, kwargs)


def unchecked(arguments) -> tuple:
    """The facts of a call by which `jax.jit` would trace again, and which an executable does not
    check: JAX's settings, and whether each number, and each array without axes, has a weak type.

    Arrays with axes are left out. Parameters of a weak type, such as arrays of `jnp.full`, have
    another type after a step, and the step would be planned twice.
    """
    numbers = (a for a in jax.tree.leaves(arguments) if not getattr(a, "ndim", 0))
    return settings(), [getattr(a, "weak_type", type(a) in (int, float, complex)) for a in numbers]


def needs_no_executable(arguments) -> bool:
    """Whether no executable may serve a call: because JAX traces the call, and the arguments hold a
    tracer, or because JAX runs without jit.
    """
    without_jit = jax.config.jax_disable_jit  # pyright: ignore
    return without_jit or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))


def refusal(function: Callable, /, *args, **named) -> tuple[str, TypeError] | None:
    """Why a function cannot be called with these arguments: its signature, and Python's error. None
    if it can be called, and if it shows no signature, as a builtin.

    Calling it and catching its TypeError would not do: a TypeError may also come from inside the
    function, and is then the user's to see.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        return str(signature), error
    return None


def _positional_names(function: Callable) -> list[str]:
    """The names of the parameters that may be positional."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin, or an object without a signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def _tuple(numbers) -> tuple:
    """One number or name, several or none, as a tuple."""
    if numbers is None:
        return ()
    return (numbers,) if isinstance(numbers, int | str) else tuple(numbers)


def _without_modules(tree):
    """The tree with Flax's NNX objects split into their graph and their arrays."""
    split = lambda x: sys.modules["flax.nnx"].split(x) if is_nnx_object(x) else x
    return jax.tree.map(split, tree, is_leaf=is_nnx_object)


def _leaf_key(leaf) -> Any:
    """The shape and the dtype of an array or a number; the sharding of an array, and the type of a
    number.
    """
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if getattr(leaf, "committed", True) else None
        return leaf.shape, leaf.dtype, leaf.aval.weak_type, sharding
    if isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        return leaf.shape, dtype, getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)
    if isinstance(leaf, bool | int | float | complex):
        return (), jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype), type(leaf)
    return (leaf,)


def _shape(leaf):
    if is_nnx_object(leaf):
        nnx = sys.modules["flax.nnx"]
        return nnx.merge(*jax.tree.map(_shape, nnx.split(leaf)))
    if isinstance(leaf, Tracer):
        weak = getattr(leaf.aval, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if getattr(leaf, "committed", True) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
