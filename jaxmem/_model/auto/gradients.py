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
"""

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

NAMES = ("grad", "value_and_grad", "vjp")  # of `jax`
_JAX = ("jax.", "jaxlib.")  # modules of JAX itself call each other as before

# What is put in the place of a function that is differentiated, as a weak reference, since jit's
# caches hold their keys for as long as there are such caches; None where nothing is.
_instead = jax.make_user_context(default_value=None)


class _Differentiators:
    """Where modules name the functions that differentiate, and what stands there now.

    To look through all modules takes milliseconds, so it is done again only where there are others.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._calls = 0  # how many of them want the wrappers there
        self._modules = 0
        self._found: list[tuple[dict, str]] = []  # in modules
        self._also: list[tuple[dict, str]] = []  # in what the calls of now named

    def enter(self, also: dict, look: bool) -> None:
        """Puts the wrappers where JAX's own functions are.

        look: whether to look through all modules in any case.
        """
        with self._lock:
            self._calls += 1
            self._look(look)
            self._also += _named_in([also])
            self._put(_originals(), _wrappers())

    def leave(self) -> None:
        """Puts JAX's own functions back after the last call, in modules imported meanwhile too."""
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self._look(False)
                self._put(_wrappers(), _originals())
                self._also = []

    def _look(self, anyhow: bool) -> None:
        if anyhow or self._modules != len(sys.modules):
            self._modules = len(sys.modules)
            self._found = _named_in(_namespaces())

    def _put(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        by_id = {id(old[name]): new[name] for name in NAMES}
        for names, name in (*self._found, *self._also):
            if id(names.get(name)) in by_id:  # else the user has put something else there
                names[name] = by_id[id(names[name])]


def _namespaces() -> Iterator[dict]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not name.startswith(_JAX):
            yield vars(module)


def _named_in(namespaces: Iterable[dict]) -> list[tuple[dict, str]]:
    """Where one of the functions, or of their wrappers, has a name."""
    wanted = {id(f) for f in (*_originals().values(), *_wrappers().values())}
    return [(d, name) for d in namespaces for name, f in list(d.items()) if id(f) in wanted]


_places = _Differentiators()


@contextlib.contextmanager
def differentiating(instead: types.MethodType, also: dict, look: bool = False) -> Iterator[None]:
    """For as long as it is entered, this thread's gradients of f are those of `instead(f)`.

    Only the outermost ones are: a function that is differentiated may differentiate others.

    instead: a method that takes a function and returns what is differentiated in its place. Its
      object's identity is part of the keys of jit's caches, so what was traced without it is not
      taken for what is traced with it.
    also: a module's names that may not be among Python's modules, such as a notebook's.
    look: whether to look through all modules in any case.
    """
    _places.enter(also, look)
    try:
        with _instead(weakref.WeakMethod(instead)):
            yield
    finally:
        _places.leave()


@functools.cache
def _originals() -> dict[str, Any]:
    return {name: getattr(jax, name) for name in NAMES}


@functools.cache
def _wrappers() -> dict[str, Any]:
    makers = {"vjp": _of_a_call}
    return {name: makers.get(name, _of_a_function)(f) for name, f in _originals().items()}


def _of_a_function(differentiate: Callable) -> Callable:
    """jax.grad and jax.value_and_grad, which return a function."""

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
    """jax.vjp, which calls the function at once."""

    @functools.wraps(differentiate)
    def wrapped(fun, *primals, **kwargs):
        instead = _instead.value
        if instead is None:
            return differentiate(fun, *primals, **kwargs)
        with _instead(None):
            return differentiate(instead()(fun), *primals, **kwargs)

    return wrapped
