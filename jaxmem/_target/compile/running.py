"""Runs whole compiled steps on the device at hand, interleaved, and times them."""

import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem._target.compile.timing import run_seconds, sample
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target, free_bytes
from jaxmem._trace.arguments import input_shardings
from jaxmem._trace.jaxpr import equations

LEAST_ROUNDS, MOST_ROUNDS = 2, 30
SMALL = 0.02  # the size of numbers in generated arguments; parameters are about as large


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has too little memory for a step."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def run_executable(executable: Any, args: tuple, kwargs: dict):
    """Runs an executable. Raises FloatingPointError for a value that `jax_debug_nans` or
    `jax_debug_infs` finds in the results, as `jax.jit` does.
    """
    try:
        return executable(*args, **kwargs)
    except Exception as error:
        # Remove with a public name: JAX 0.10 to 0.12 exports none for the error of an executable.
        if type(error).__name__ != "InternalFloatingPointError":
            raise
        name, value = error.args
        raise FloatingPointError(
            f"invalid value ({value}) in the results of {name}; call the step under"
            " jax.disable_jit() without jaxmem to find the operation"
        ) from error


class CannotRun(Exception):
    """A step that is not run to be timed, and why."""


def obstacle(traced: jax.stages.Traced, given: bool) -> str | None:
    """Why a step is not run to be timed, or None.

    traced: the step.
    given: whether it would run on the user's own arrays.
    """
    if traced.jaxpr.effects:
        return "it has effects besides what it returns, such as a print or a callback"
    if not given and any(e.primitive.name == "while" for e in equations(traced.jaxpr.jaxpr)):
        return "a loop in it may not end on made-up numbers; give arrays in place of shapes"
    if jax.process_count() > 1:
        return "it runs on several processes"
    return None


def fits(compiled: Compiled, target: Target) -> bool:
    """Whether there is memory to run a step: for its bytes, and for the copies of the arguments
    that it donates.
    """
    return compiled.total_bytes + compiled.argument_bytes <= free_bytes(target)


class StepRun:
    """A compiled step, and arguments to call it with as often as wanted: it gets copies of those
    that it takes the memory of.

    given: whether the arguments are the user's; else they are made up.
    """

    def __init__(self, executable: Any, args: tuple):
        """executable: a compiled step, of jax.jit, nnx.jit or a `FilteredStage`.
        args: arrays or shapes that the step was traced for.
        """
        self._compiled = getattr(executable, "compiled", executable)  # JAX's own
        self._infos = jax.tree.leaves(self._compiled.args_info)
        # nnx.jit would change the user's modules, and a `FilteredStage` flattens in its own way.
        self._given = jax.tree.leaves(args) if self._compiled is executable else []
        same = len(self._given) == len(self._infos)
        self.given = same and all(map(_is_array_of, self._given, self._infos))

    @functools.cached_property
    def _leaves(self) -> list:
        """The arguments, with the program's shardings; arguments that it does not read have any."""
        shapes = (jax.ShapeDtypeStruct(info.shape, info.dtype) for info in self._infos)
        leaves = self._given if self.given else [sample(shape, SMALL) for shape in shapes]
        pairs = zip(leaves, input_shardings(self._compiled))
        return [a if s is None else jax.device_put(a, s) for a, s in pairs]

    def __call__(self) -> float:
        """Runs the step once, and returns the seconds that it took."""
        pairs = zip(self._leaves, self._infos)
        leaves = [jax.device_put(a, may_alias=False) if i.donated else a for a, i in pairs]
        args, kwargs = jax.tree.unflatten(self._compiled.in_tree, leaves)
        jax.block_until_ready(leaves)
        return run_seconds(self._compiled, *args, **kwargs)


def in_turns(runs: Sequence[Callable[[], float]], seconds: float) -> list[list[float]]:
    """The seconds of each step in each of several rounds. They have run once before.

    Every round runs each step once, in an order of its own, so that what else the machine does
    falls on all of them alike. Rounds end after `seconds`, but there are at least `LEAST_ROUNDS`.
    """
    found: list[list[float]] = [[] for _ in runs]
    start = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - start > seconds:
            break
        for i in random.Random(number).sample(range(len(runs)), len(runs)):
            found[i].append(runs[i]())
    return found


def _is_array_of(leaf, info) -> bool:
    """Whether a leaf is an array with the shape and dtype of `info`."""
    is_array = isinstance(leaf, (jax.Array, np.ndarray))
    return is_array and (leaf.shape, leaf.dtype) == (info.shape, info.dtype)
