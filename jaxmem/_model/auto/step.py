"""Makes blocks of the layers in a training step, in each function that the step differentiates."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jaxmem._core.assignment import Decisions, leaves_as_written
from jaxmem._core.groups import auto_label
from jaxmem._model.auto.calls import traced
from jaxmem._model.auto.find import Finder, loops_named, read
from jaxmem._model.auto.gradients import NAMES, differentiating, innermost, made_before
from jaxmem._model.layer.block import Layer
from jaxmem._model.layer.graph import flops, has_effects
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._model.tags.policy import decisions
from jaxmem._trace.jaxpr import ClosedJaxpr
from jaxmem._trace.rewrite import Node, Program
from jaxmem.errors import NoLayersError, StepError


def build_of(step: Callable) -> Callable:
    """Returns the function `build` for `jaxmem.plan`: `build(plan)` is the step under a plan. For
    None, and for a plan that leaves the step as written, it is the step itself.
    """

    known: list[PlannedStep] = []  # the latest step, once there is one

    def auto(plan, *others):
        if leaves_as_written(plan) and not others:
            return step
        if others or not isinstance(plan, Decisions):
            raise StepError(
                f"auto: called with {type(plan).__name__} where a plan was expected; without a plan"
                " `jaxmem.auto(step)` is for `jaxmem.plan`. To run a step, or to differentiate a"
                " loss, give the plan too: jaxmem.auto(function, plan)"
            )
        planned = planned_step(step, decisions(plan))
        planned.looks = not (known and known[0].found)
        known[:] = [planned]
        return planned

    # A trace may lack a block that has a label: JAX computes a block as it is that no gradient
    # reaches, such as the targets under a `stop_gradient`.
    taken = lambda: sum(latest.rewriter.labels for latest in known)
    auto.labels = lambda: [auto_label(i + 1) for i in range(taken())]  # pyright: ignore
    return auto


def planned_step(
    step: Callable, decided: Decisions, layers: list[Layer] | None = None
) -> "PlannedStep":
    """Returns the step under a plan. A jitted step keeps the options of its jit. The layers that
    are found are appended to `layers`.
    """
    return (JittedStep if hasattr(step, "trace") else PlannedStep)(step, decided, layers)


class PlannedStep:
    """A step with blocks of the layers of every function that it differentiates.

    rewriter: makes the blocks, and counts their labels.
    looks: whether all modules are searched for gradient functions. A search traces a step a hundred
      times, and the modules are searched until layers are found.
    """

    looks = True

    def __init__(self, step: Callable, decided: Decisions, layers: list[Layer] | None = None):
        """layers: the list to which the layers that are found are appended."""
        self._step = step
        self.rewriter = Rewriter(decided, layers)
        functools.update_wrapper(self, step, updated=())

    @property
    def found(self) -> bool:
        """Whether a layer has been found."""
        return self.rewriter.found

    def __call__(self, *args, **kwargs):
        return self._checked(self._step, args, kwargs)

    def within(self, function: Callable, *args, **kwargs):
        """Calls `function`. The functions that it differentiates have blocks of their layers."""
        names = getattr(innermost(self._step), "__globals__", {})
        with differentiating(self.rewriter.with_blocks, names, self.looks and not self.found):
            return function(*args, **kwargs)

    def _checked(self, function: Callable, args: tuple, kwargs: dict):
        """Calls the step, or its `trace` or `lower`. Raises NoLayersError if no layer is found."""
        result = self.within(function, *args, **kwargs)
        if not self.found:
            raise self.no_layers()
        return result

    def no_layers(self) -> NoLayersError:
        """Returns the error for a step without layers."""
        if self.rewriter.error is not None:
            return self.rewriter.error
        name = getattr(self._step, "__name__", type(self._step).__name__)
        before = made_before(self._step)
        made = f": it uses {', '.join(before)}" if before else ""
        return NoLayersError(
            f"auto: {name!r} called none of {', '.join(f'jax.{n}' for n in NAMES)} while it was"
            f" traced. A gradient function that was made before is not seen{made}. Make it inside"
            " the step, as in `gradients = jax.grad(loss)(params, batch)`; or let it differentiate"
            " jaxmem.auto(loss, plan), in a `build` that is given the plan"
        )


class JittedStep(PlannedStep):
    """A step of `jax.jit` or `nnx.jit`, with its `trace` and `lower`."""

    def trace(self, *args, **kwargs):
        return self._checked(self._step.trace, args, kwargs)  # pyright: ignore

    def lower(self, *args, **kwargs):
        return self._checked(self._step.lower, args, kwargs)  # pyright: ignore


class Rewriter:
    """Rewrites the functions of one loss or step. The layers of different functions have different
    labels.

    It stores no program: a training loop may call it in every step.

    found: whether a layer has been found.
    error: the error for a step without layers, about the function with most FLOPs; None before the
      first function.
    labels: the number of labels that blocks have taken.
    """

    def __init__(self, decided: Decisions, layers: list[Layer] | None = None):
        """layers: the list to which the layers that are found are appended."""
        self.found = False
        self.error: NoLayersError | None = None
        self._layers = layers
        self._work = -1.0  # FLOPs of the function that `error` is about
        self._decided = decided
        self.labels = 0
        self._first: dict[Any, int] = {}

    def with_blocks(self, function: Callable) -> Callable:
        """Returns `function` with its layers as blocks. It computes the same if there are none."""

        @functools.wraps(function, updated=())
        def rewritten(*args, **kwargs):
            return self.result(function, *traced(function, args, kwargs))

        return rewritten

    def result(self, function: Callable, closed: ClosedJaxpr, call: Callable):
        """Computes the result of a call of `function` with its layers as blocks. `closed` and
        `call` are as `traced` returns them.
        """
        program = read(closed)
        # JAX may trace the function again, such as for other shapes: its layers keep their labels.
        code = getattr(inspect.unwrap(function), "__code__", type(function))
        operations = tuple(node.primitive for node in program.nodes)
        first = self._first.setdefault((code, operations), self.labels)
        finder = Finder(self._decided, first)
        # Conditionals and shard_maps are searched when JAX traces them, in `run`.
        with todays_checkpoint():
            result = call(finder.with_blocks(program).run)
        self.labels = max(self.labels, finder.labels)
        self.found = self.found or bool(finder.found)
        if self._layers is not None:
            self._layers += finder.found
        if not self.found and (work := sum(map(flops, program.nodes))) > self._work:
            self._work, self.error = work, _no_layers(function, program)
        return result


def _no_layers(function: Callable, program: Program) -> NoLayersError:
    """Returns the error, with the largest loops and why each is not a loop over layers."""
    name = getattr(function, "__name__", type(function).__name__)
    products = sum(flops(n) > 0 for n in program.nodes)
    return NoLayersError(
        f"auto: no layer was found in {name!r} ({loops_named(program, _why_not)}; {products} of its"
        " operations outside loops multiply matrices). Layers are stretches of operations before"
        " the last product, and turns of a jax.lax.scan with products or many bytes. Wrap a layer"
        " by hand: jax.checkpoint(layer, policy=jaxmem.remat_policy(plan))"
    )


def _why_not(node: Node) -> str:
    """Returns the reason why a loop is not a loop over layers, in words."""
    if node.primitive == "while":
        return "a while loop has no derivative; a fori_loop of a known number of turns is a scan"
    if flops(node) == 0:
        return "its turns hold no matrix product, and few bytes"
    if has_effects(node):
        return "its turns call io_callback, or read, write or make a jax.Ref, which no block may"
    return "it has one turn" if node.eqn.params["length"] < 2 else "its blocks are planned already"
