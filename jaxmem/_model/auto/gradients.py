"""Sees which functions a step differentiates while the step is traced, and differentiates other
functions in their place.

A whole step is rewritten where it differentiates. The alternative is to rewrite the step's trace.
The trace shows the backward, which is too late to decide in, and JAX has no hook before. So the
functions that differentiate are wrapped in every module that names them, for the time of a call,
and are restored after it. The wrappers read a context of JAX's own (`jax.make_user_context`); where
the context is not set, they call the function that they wrap. The context belongs to a thread, and
is part of the keys of jit's caches. So the planned step is traced separately from the user's step,
and a jitted step is called as it is, with its options.

Wrapping the functions that `jax.grad` itself calls would see more, but would depend on private
files of JAX.

A gradient function that was made before the step was traced cannot be replaced: `grad_fn =
jax.grad(loss)` at the top of a module is a function of JAX when the step calls it. `made_before`
finds these functions, so that an error can name the line to change.
"""

import contextlib
import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

NAMES = ("grad", "value_and_grad", "vjp", "jacrev", "linearize")  # of `jax`
_DEPTH = 3  # functions of the user that call each other
_JAX = ("jax.", "jaxlib.")  # modules of JAX itself call each other as before

# The method that returns the replacement of a differentiated function, as a weak reference, since
# jit's caches keep their keys alive; None if functions are not replaced.
_instead = jax.make_user_context(default_value=None)


class _Differentiators:
    """The names of JAX's gradient functions in all modules, and their current values.

    A search through all modules takes milliseconds, so it is repeated only if there are new
    modules.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._calls = 0  # number of calls that need the wrappers now
        self._modules = 0
        self._found: list[tuple[dict, str]] = []  # in modules
        self._also: list[tuple[dict, str]] = []  # in the namespaces that current calls passed

    def enter(self, also: dict, look: bool) -> None:
        """Replaces JAX's own functions by the wrappers.

        look: whether to search all modules in any case.
        """
        with self._lock:
            self._calls += 1
            self._look(look)
            self._also += _named_in([also])
            self._put(_originals(), _wrappers())

    def leave(self) -> None:
        """Restores JAX's own functions after the last call, also in modules that were imported
        during the call.
        """
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._look(False)
                self._put(_wrappers(), _originals())
                self._also = []

    def _look(self, anyhow: bool) -> None:
        """Searches the modules for gradient functions again, if modules were imported since."""
        if anyhow or self._modules != len(sys.modules):
            self._modules = len(sys.modules)
            self._found = _named_in(_namespaces())

    def _put(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Replaces the functions `old` by `new` of the same name, in every namespace that was
        found.
        """
        by_id = {id(old[name]): new[name] for name in NAMES}
        for names, name in (*self._found, *self._also):
            if id(names.get(name)) in by_id:  # otherwise the user has changed the name's value
                names[name] = by_id[id(names[name])]


def _namespaces() -> Iterator[dict]:
    """Yields the variables of each imported module that is not part of JAX."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith(_JAX):
            yield vars(module)


def _named_in(namespaces: Iterable[dict]) -> list[tuple[dict, str]]:
    """Returns each namespace and name of a gradient function or of a wrapper."""
    wanted = {id(f) for f in (*_originals().values(), *_wrappers().values())}
    return [(d, name) for d in namespaces for name, f in list(d.items()) if id(f) in wanted]


_differentiators = _Differentiators()


@contextlib.contextmanager
def differentiating(instead: types.MethodType, also: dict, look: bool = False) -> Iterator[None]:
    """A context in which this thread differentiates `instead(f)` in place of f.

    Only outermost gradients are replaced: a differentiated function may differentiate others.

    instead: a method from a function to its replacement. The identity of the method's object is
      part of the keys of jit's caches, so jit does not reuse a trace that was made without it.
    also: a namespace that may not be among Python's modules, such as a notebook's.
    look: whether to search all modules in any case.
    """
    _differentiators.enter(also, look)
    try:
        with _instead(weakref.WeakMethod(instead)):
            yield
    finally:
        _differentiators.leave()


@functools.cache
def _originals() -> dict[str, Any]:
    """Returns JAX's own gradient functions by name."""
    return {name: getattr(jax, name) for name in NAMES}


@functools.cache
def _wrappers() -> dict[str, Any]:
    """Returns the wrappers of the gradient functions by name."""
    makers = {"vjp": _of_a_call, "linearize": _of_a_call}
    return {name: makers.get(name, _of_a_function)(f) for name, f in _originals().items()}


def _of_a_function(differentiate: Callable) -> Callable:
    """Wraps jax.grad, jax.value_and_grad and jax.jacrev, which return a function."""

    @functools.wraps(differentiate)
    def wrapped(fun, *args, **kwargs):
        instead = _instead.value
        if instead is None:
            return differentiate(fun, *args, **kwargs)
        made = differentiate(instead()(fun), *args, **kwargs)

        @functools.wraps(made)
        def outermost(*operands, **named):
            with _instead(None):
                return made(*operands, **named)

        return outermost

    return wrapped


def _of_a_call(differentiate: Callable) -> Callable:
    """Wraps jax.vjp and jax.linearize, which call the function at once."""

    @functools.wraps(differentiate)
    def wrapped(fun, *primals, **kwargs):
        instead = _instead.value
        if instead is None:
            return differentiate(fun, *primals, **kwargs)
        with _instead(None):
            return differentiate(instead()(fun), *primals, **kwargs)

    return wrapped


def made_before(step: Callable) -> list[str]:
    """Returns the gradient functions in a step's code, such as "grad_fn (of loss, train.py:12)"."""
    found: dict[str, None] = {}
    _search(step, _DEPTH, found, set())
    return list(found)


def innermost(function):
    """Returns the function inside all decorators and partials."""
    return _wrapped(function)[-1]


def _search(function, depth: int, found: dict[str, None], seen: set[int]) -> None:
    """Adds to `found` the gradient functions that a function's code names, and the functions that
    it calls, to `depth` calls.
    """
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
                of = getattr(differentiated, "__name__", type(differentiated).__name__)
                found[f"{name} (of {of}{where})"] = None
            elif depth > 0 and callable(value) and _is_of_the_user(value, inner):
                _search(value, depth - 1, found, seen)


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yields the variables that a function's code reads by name: module variables, and variables of
    enclosing functions.
    """
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
    """Whether a function `value` comes from the package of `function`."""
    package = lambda f: (getattr(f, "__module__", None) or "").partition(".")[0]
    return package(value) == package(function)


def _wrapped(function) -> list:
    """Returns the function, and the functions that its decorators and partials wrap."""
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
    """Returns the function that a gradient function of JAX differentiates; None if `value` is not a
    gradient function.
    """
    chain = _wrapped(value)
    for outer, inner in itertools.pairwise(chain):
        if getattr(outer, "__code__", None) in _codes_of_gradients():
            return inner
    return None


def _partial_of(value) -> str | None:
    """Returns the name of the JAX function in a `functools.partial` of a gradient function; else
    None.
    """
    if not isinstance(value, functools.partial):
        return None
    return next((name for name, way in _originals().items() if value.func is way), None)


@functools.cache
def _codes_of_gradients() -> frozenset:
    """Returns the code of the functions that jax.grad, value_and_grad and jacrev return."""
    found = set()
    for has_aux in (False, True):
        for differentiate in (jax.grad, jax.value_and_grad, jax.jacrev):
            # The wrapper next to the function itself: outer wrappers belong to other functions too.
            found.add(_wrapped(differentiate(lambda x: x, has_aux=has_aux))[-2].__code__)
    return frozenset(found)
