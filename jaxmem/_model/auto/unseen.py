"""Finds gradient functions that a step uses and that were made before it was traced.

`grad_fn = jax.grad(loss)` at a module's top is JAX's own by the time that a step calls it, and
nothing can be put in its place; what can be done is to say which line to change.
"""

import functools
import itertools
import types
from collections.abc import Callable, Iterator

import jax

_DEPTH = 3  # functions of the user's that call each other


def made_before(step: Callable) -> list[str]:
    """Gradient functions that a step's code names, such as "grad_fn (of loss, train.py:12)"."""
    found: dict[str, None] = {}
    _search(step, _DEPTH, found, set())
    return list(found)


def innermost(function):
    """The function that decorators and partials wrap."""
    return _wrapped(function)[-1]


def _search(function, depth: int, found: dict[str, None], seen: set[int]) -> None:
    for inner in _wrapped(function):
        if not isinstance(inner, types.FunctionType) or id(inner) in seen:
            continue
        seen.add(id(inner))
        for name, value in _named_by(inner):
            if (way := _partial_of(value)) is not None:
                found[f"{name} (a partial of jax.{way})"] = None
            elif (differentiated := _differentiated(value)) is not None:
                code = getattr(differentiated, "__code__", None)
                where = f", {code.co_filename}:{code.co_firstlineno}" if code else ""
                found[f"{name} (of {_name(differentiated)}{where})"] = None
            elif depth > 0 and callable(value) and _is_of_the_user(value, inner):
                _search(value, depth - 1, found, seen)


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function's code reads by name: module variables, and variables round it."""
    codes = [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    names = {name for code in codes for name in code.co_names}
    yield from ((n, function.__globals__[n]) for n in sorted(names & {*function.__globals__}))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _is_of_the_user(value, function: types.FunctionType) -> bool:
    """Whether a function comes from the module, or the package, of another one."""
    package = lambda f: (getattr(f, "__module__", None) or "").partition(".")[0]
    return package(value) == package(function)


def _wrapped(function) -> list:
    """The function, and those in it that decorators and partials wrap."""
    chain = []
    while function is not None and len(chain) < 20:
        chain.append(function)
        function = getattr(function, "__func__", None) or (
            function.func
            if isinstance(function, functools.partial)
            else getattr(function, "__wrapped__", None)
        )
    return chain


def _differentiated(value):
    """The function of which `value` is the gradient, as JAX makes it; None if it is none."""
    chain = _wrapped(value)
    for outer, inner in itertools.pairwise(chain):
        if getattr(outer, "__code__", None) in _codes_of_gradients():
            return inner
    return None


def _partial_of(value) -> str | None:
    """The name of the function of JAX's that a `functools.partial` differentiates by, if any."""
    ways = {"grad": jax.grad, "value_and_grad": jax.value_and_grad, "vjp": jax.vjp}
    if not isinstance(value, functools.partial):
        return None
    return next((name for name, way in ways.items() if value.func is way), None)


@functools.cache
def _codes_of_gradients() -> frozenset:
    """The code of the functions that jax.grad and jax.value_and_grad return."""
    found = set()
    for has_aux in (False, True):
        for differentiate in (jax.grad, jax.value_and_grad):
            # The last one but the function itself: those round it belong to other functions too.
            found.add(_wrapped(differentiate(_nothing, has_aux=has_aux))[-2].__code__)
    return frozenset(found)


def _nothing(x):
    return x


def _name(function) -> str:
    return getattr(function, "__name__", type(function).__name__)
