"""`jaxmem.jit`: `jax.jit` for a training step, under a byte budget.

At the first call for given shapes the step is planned as by `jaxmem.plan(jaxmem.auto(step), ...)`,
and the plan's executable runs. Later calls run the executable directly. It has JAX's own fast path,
and refuses arguments that it was not compiled for; only then are the arguments' shapes looked up.
The alternative, a key of all arguments at every call, takes longer than a short step.
"""

import collections
import contextlib
import dataclasses
import difflib
import functools
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxmem._core.actions import AS_WRITTEN
from jaxmem._core.bytes import parse_budget, show_bytes
from jaxmem._core.progress import LOG, reported
from jaxmem._core.warn import warn
from jaxmem._model.auto.auto import auto
from jaxmem._optim.released.loss import LossStep, bound
from jaxmem._optim.released.step import ReleasedStep
from jaxmem._planner.explain.explain import explain
from jaxmem._planner.placement.plan import STATES
from jaxmem._planner.recall import plan_or_recall
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._result.memory.explanation import Explanation
from jaxmem._result.plan.plan import Plan, pace
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.running import ran_out_of_memory, run_executable
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
from jaxmem._target.processes.channel import joined
from jaxmem._trace.filtered import is_array, jitted_for
from jaxmem._trace.settings import settings_of_thread
from jaxmem._trace.signature import Adapted, Signature, needs_no_executable, unchecked
from jaxmem.errors import BudgetError, JaxmemError, NoLayersError, StepError

# The options of `jaxmem.plan` that `jit` takes, and those that need a plan's own arguments.
PLANNING = ("host_budget", "actions", "codecs", "outliers", "measure", "fresh")
PLANNING += ("decide", "lossy_states")
ELSEWHERE = ("target", "microbatches", "batch", "sizes")
LESS = 0.9  # the share of its bytes that a step which ran out of memory may take
RETRIES = 3  # plans after a step ran out of memory


def jit(step: Callable | None = None, budget=None, **options):
    """Compiles a training step under a byte budget, in place of `jax.jit`.

        train_step = jaxmem.jit(train_step, budget="20GiB", donate_argnums=0)

    At the first call for given shapes, jaxmem finds the layers of the functions that the step
    differentiates (`jaxmem.auto`), plans the layers (`jaxmem.plan`), compiles the step under the
    plan, and runs it. Later calls run the compiled step. A step that fits, and that no plan makes
    faster, runs as it is. The plan is stored on the disk: a later process compiles the step once
    and searches nothing. If several processes call the step, the first process decides.

    If the step runs out of memory at its first run, it is planned again for 90 % of its bytes.

    Inside another function that JAX traces, such as a library's own jit, the step is planned for
    the shapes of its arguments there, for one device.

    step: a step of `jaxmem.released_step`; a function of arrays, of Flax NNX objects (as for
      `nnx.jit`) or of Equinox modules (as for `eqx.filter_jit`); a function that `jax.jit` or
      `nnx.jit` made, which keeps its donation and shardings; or a function of `eqx.filter_jit`
      without donation. None returns a decorator.
    budget: bytes of the whole step on one device: a number, a text such as "12GiB", or a share of
      the device's usable memory such as "90%". None means all usable memory.
    options: `host_budget`, `actions`, `codecs`, `outliers`, `measure` and `fresh` are options of
      `jaxmem.plan`. `decide` and `lossy_states` are options for a released step: with
      decide=("actions", "states"), the plan also decides which layers' states are stored in host
      memory, and the first call moves them there. All others are options of `jax.jit` or
      `nnx.jit`, such as `donate_argnums`, `static_argnames` and `out_shardings`. For Equinox
      modules, `donate_argnums` and `donate_argnames` are the only options: functions, texts and the
      numbers of a module are static, and other numbers are traced. A released step takes no options
      of jit: its state is donated.

    Returns a `PlannedFunction`: it is called like the step, and has `plan`, `explain`, `trace` and
    `lower`. For a released step, it also has `init` and `joined`. While jaxmem plans, a terminal
    shows the progress. Afterwards one line summarizes the plan. Both go through the logger
    "jaxmem". For a jitted method, the result is a bound method of a `PlannedFunction`.

    Raises StepError if `step` is not callable, or is a method of an Equinox module with arrays; for
    options of a step that is jitted already, for a step of `eqx.filter_jit` that donates, for
    options of `jaxmem.plan` that need other arguments than the step's, and for options of neither
    `jaxmem.plan` nor jit. A call raises StepError for a jitted step with static arguments, and the
    errors of `jaxmem.plan`, such as BudgetError if no plan fits. An error that the step's own code
    raises is raised as it is.
    """
    if step is None:
        return functools.partial(jit, budget=budget, **options)
    if not callable(step):
        raise StepError(
            f"jit: `step` is {type(step).__name__}; expected the training step, a function; a"
            " decorator takes its budget by name: @jaxmem.jit(budget=...)"
        )
    if isinstance(step, types.MethodType) and hasattr(step, "trace"):  # a jitted method
        return types.MethodType(jit(step.__func__, budget, **options), step.__self__)
    equinox = sys.modules.get("equinox")
    is_module = equinox is not None and isinstance(step, equinox.Module)
    if is_module and any(map(is_array, jax.tree.leaves(step))):
        raise StepError(
            "jit: `step` is an Equinox module, or a method of one, and holds arrays; expected a"
            " function of the module, as in jaxmem.jit(lambda model, x: model.step(x))"
        )
    if wrong := [name for name in ELSEWHERE if name in options]:
        raise StepError(
            f"jit: got the option `{wrong[0]}`; expected a step that runs here, with the arguments"
            " that it is called with: make a plan by jaxmem.plan(jaxmem.auto(step), ...), and run"
            " jaxmem.auto(step, plan)"
        )
    if getattr(step, "donate_first", False) or getattr(step, "donate_rest", False):
        raise StepError(
            "jit: `step` is jitted by eqx.filter_jit with donation, which is lost inside another"
            " jit; expected the function itself with donate_argnums, as in"
            " jaxmem.jit(function, donate_argnums=0)"
        )
    planning = {name: options.pop(name) for name in PLANNING if name in options}
    if isinstance(step, LossStep | ReleasedStep):
        if options:
            raise StepError(
                f"jit: `step` is a released step, and got the option `{next(iter(options))}`;"
                " expected none of jit's: the state is donated, and the step takes arrays alone"
            )
        return PlannedRelease(step, {"budget": budget} | planning, {})
    if given := [name for name in ("decide", "lossy_states") if name in planning]:
        raise StepError(
            f"jit: `step` is no released step, but {type(step).__name__}, and got the option"
            f" `{given[0]}`; expected what jaxmem.released_step returns, whose states a plan can"
            " place"
        )
    if options and hasattr(step, "trace"):
        raise StepError(
            f"jit: `step` is jitted already, and got the option `{next(iter(options))}`; expected"
            " the function itself with this option, or the jitted step without options of jit"
        )
    _check_options(options)
    return PlannedFunction(step, {"budget": budget} | planning, options)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises StepError for an option that neither `jax.jit` nor `nnx.jit` takes."""
    jits = jax.jit, *(nnx.jit for nnx in [sys.modules.get("flax.nnx")] if nnx is not None)
    known = {*PLANNING, "budget"}.union(*(inspect.signature(one).parameters for one in jits))
    if unknown := [name for name in options if name not in known]:
        close = difflib.get_close_matches(unknown[0], known, 1)
        raise StepError(
            f"jit: got the option `{unknown[0]}`; expected options of jaxmem.plan"
            f" ({', '.join(PLANNING)}) or of jax.jit"
            + (f": did you mean `{close[0]}`?" if close else ", such as donate_argnums")
        )


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The step compiled for arguments of one signature.

    build: returns the step under a plan, as a function of the dynamic arguments' values.
    plan: what was decided; None for a step in which jaxmem finds no layer.
    run: the executable, called like the step without its static arguments.
    shapes: the values of all arguments, with shapes in place of arrays.
    placed: moves the positional arguments to the memories that the plan chose.
    """

    build: Callable
    plan: Plan | None
    run: Callable
    shapes: tuple
    placed: Callable[[tuple], tuple] = lambda args: args


class PlannedFunction:
    """A training step that jaxmem plans at its first call; made by `jaxmem.jit`."""

    def __init__(self, step: Callable, planning: Mapping[str, Any], options: Mapping[str, Any]):
        functools.update_wrapper(self, step, updated=())
        self._step, self._planning, self._options = step, dict(planning), dict(options)
        self._signature = Signature(step, options)
        self._known: dict[Any, Compilation] = {}
        self._ran: set = set()  # keys of `_known` whose executables have run once
        # Of the latest call, its key and `unchecked` (None: any is alike): one value for threads.
        self._last: tuple[Compilation, Any, tuple | None] | None = None
        self._lock = threading.Lock()
        self._build = self._under_plans(step)

    def __call__(self, *args, **kwargs):
        # An executable does not see static arguments, so that each call looks its executable up.
        latest, last_key, last_unchecked = self._last or (None, None, None)
        alike = last_unchecked in (None, unchecked((args, kwargs)))
        if latest is not None and alike and not self._signature.static:
            try:
                return run_executable(latest.run, args, kwargs)
            except (TypeError, ValueError):  # raised before the executable runs or takes memory
                inside = needs_no_executable((args, kwargs))
                if not inside and self._signature.key(args, kwargs) == last_key:
                    raise
        return self._called(args, kwargs)

    def __get__(self, instance, owner=None):
        """A bound method, if the step is defined in a class."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo) -> "PlannedFunction":
        """Itself, as for a function of `jax.jit`: executables and locks cannot be copied."""
        return self

    @property
    def plan(self) -> Plan:
        """The plan of the latest call by itself; before such a call, the latest plan.

        Raises StepError before the first call, and if jaxmem found no layer in the step.
        """
        return self._decided()[1]

    @property
    def unplanned(self) -> Adapted:
        """The step under its jit without a plan, which `jaxmem.auto` reads: so the function can be
        planned for another device too, or a saved plan of it can be verified.
        """
        under = lambda args, kwargs: self._jitted(self._step, args, kwargs)
        call = lambda method, args, kwargs: getattr(under(args, kwargs), method)(*args, **kwargs)
        return Adapted(self._step, call)

    def explain(self) -> Explanation:
        """Names the buffers that hold the memory of the latest call's step, as `jaxmem.explain`.

        Raises StepError as `plan`.
        """
        latest, plan = self._decided()
        return explain(latest.build, *latest.shapes, plan=plan)

    def trace(self, *args, **kwargs):
        """Plans the step for these arguments, and traces it under the plan."""
        return self._stage(args, kwargs).trace(*args, **kwargs)

    def lower(self, *args, **kwargs):
        """Plans the step for these arguments, and lowers it under the plan."""
        return self._stage(args, kwargs).lower(*args, **kwargs)

    def _decided(self) -> tuple[Compilation, Plan]:
        # A first call watches the memory, so that `trace` and `lower` leave `_last` as it is.
        latest = self._last[0] if self._last else next(reversed(self._known.values()), None)
        if latest is None:
            raise StepError(
                "jit: the step has no plan before its first call; call it first, or make a plan by"
                " jaxmem.plan(jaxmem.auto(step), ...)"
            )
        if latest.plan is None:
            raise StepError("jit: the step has no plan, since jaxmem found no layer in it")
        return latest, latest.plan

    def _stage(self, args: tuple, kwargs: dict):
        """The jitted step under the plan for these arguments."""
        plan = self._compilation(args, kwargs, self._signature.key(args, kwargs)).plan
        return self._jitted(self._step if plan is None else self._build(plan), args, kwargs)

    def _called(self, args: tuple, kwargs: dict):
        """Looks the executable up, after the step is planned if it is new, and runs it."""
        if needs_no_executable((args, kwargs)):
            return self._inside(args, kwargs)
        key = self._signature.key(args, kwargs)
        latest = self._compilation(args, kwargs, key)
        # A state that the plan moves has another key once it is moved.
        moves = latest.plan is not None and latest.plan.places is not None
        last_key, alike = (None, None) if moves else (key, unchecked((args, kwargs)))
        self._last = latest, last_key, alike
        for _ in range(0 if key in self._ran else RETRIES):
            args = latest.placed(args)
            dynamic, named = self._signature.dynamic(args, kwargs)
            try:
                result = jax.block_until_ready(run_executable(latest.run, dynamic, named))
                self._ran.add(key)
                return result
            except jax.errors.JaxRuntimeError as error:
                latest = self._smaller(latest, error, args, kwargs)
                self._known[key], self._last = latest, (latest, last_key, alike)
        dynamic, named = self._signature.dynamic(latest.placed(args), kwargs)
        return run_executable(latest.run, dynamic, named)

    def _smaller(self, latest: Compilation, error: Exception, args, kwargs) -> Compilation:
        """The step planned for less memory than a plan under which it ran out of memory. Raises the
        error if it has another reason, if the run consumed donated arguments, and if there are
        several processes.
        """
        leaves = jax.tree.leaves((args, kwargs))
        consumed = any(isinstance(a, jax.Array) and a.is_deleted() for a in leaves)
        several = jax.process_count() > 1  # the other processes may have memory, and do not plan
        if not ran_out_of_memory(error) or latest.plan is None or consumed or several:
            raise error
        bytes_ = int(LESS * latest.plan.compiled_bytes)
        warn(
            "jit: the step ran out of memory under a plan of"
            f" {show_bytes(latest.plan.compiled_bytes)}; it is planned again for"
            f" {show_bytes(bytes_)}: other programs may use the device, or its memory is in pieces"
        )
        try:
            return self._made(args, kwargs, {"budget": bytes_})
        except BudgetError as none:
            raise none from error

    def _inside(self, args: tuple, kwargs: dict):
        """The step inside another function that JAX traces, or without jit: under the latest plan
        for these shapes. Under a mesh, whose shardings are not known there, any plan serves.
        """
        shapes, named = self._signature.shapes((args, kwargs))
        key, entered = self._signature.key(shapes, named), settings_of_thread()
        alike = (k for k in reversed([*self._known]) if self._signature.alike(k, key))
        in_mesh = bool(jax.sharding.get_abstract_mesh().axis_names)
        other = self._last[0] if in_mesh and self._last else None
        latest = self._known.get(next(alike, None), other)
        if latest is None and in_mesh:
            warn(
                "jit: the step is called inside another function that JAX traces under a mesh,"
                " before it has a plan, and runs there as it is; call it by itself first, or"
                " pass the outer function to jaxmem.jit"
            )
            return self._step(*args, **kwargs)
        if latest is None:

            def planned() -> Compilation:
                with entered():
                    return self._compilation(shapes, named, key)

            with ThreadPoolExecutor(1) as thread:  # a trace belongs to its thread
                latest = thread.submit(planned).result()
            self._last = latest, key, unchecked((shapes, named))
        step = self._step if latest.plan is None else self._build(latest.plan)
        return step(*args, **kwargs)

    def _compilation(self, args: tuple, kwargs: dict, key) -> Compilation:
        with self._lock:
            try:
                known = key in self._known
            except TypeError as error:
                raise StepError(
                    f"jit: an argument cannot be hashed: {error}; expected static arguments, and"
                    " fields of containers that are no arrays, that can be hashed, such as a tuple"
                    " in place of a list"
                ) from None
            if not known:
                self._known[key] = self._made(args, kwargs, {})
        return self._known[key]

    def _made(self, args: tuple, kwargs: dict, changed: Mapping[str, Any]) -> Compilation:
        """Plans and compiles the step for these arguments.

        changed: options of planning that take the place of the user's.
        """
        values, called = self._signature.positional(args, kwargs)
        jitted = self._builder(args, kwargs, called)
        start, failed = time.perf_counter(), None
        with reported():
            try:
                plan = plan_or_recall(
                    jitted, *values, options=self._planning, changed=dict(changed)
                )
            except NoLayersError as error:
                return self._unplanned(jitted, values, error)
            except StepError as error:
                failed = error
            if failed is not None:
                # An error of the step's own code is raised as it is. Of several processes, only the
                # first one knows the cause.
                if failed.__cause__ is not None or jax.process_count() > 1:
                    with contextlib.suppress(JaxmemError):
                        self._jitted(self._step, args, kwargs).trace(*args, **kwargs)
                raise failed
            name = getattr(self._step, "__name__", type(self._step).__name__)
            LOG.info(
                "%s", _summary(name, plan, time.perf_counter() - start), extra={"summary": True}
            )
        self._check_no_static(plan.step, values)
        place = lambda args: args if plan.places is None else (plan.place(args[0]), *args[1:])
        return Compilation(jitted, plan, plan.step, self._signature.shapes(values), place)

    def _under_plans(self, step: Callable) -> Callable[[Plan], Callable]:
        """Returns a function of a plan that returns the step under the plan."""
        return auto(step)

    def _builder(self, args: tuple, kwargs: dict, called: Callable) -> Callable:
        """Returns the `build` of `jaxmem.plan` for these arguments."""
        build = lambda plan: called(self._jitted(self._build(plan), args, kwargs))
        return functools.wraps(self._build)(build)

    def _check_no_static(self, executable, values: tuple) -> None:
        """Raises StepError if a jitted step has static arguments, since the executable is called
        without them.
        """
        # Remove with a public name: JAX 0.10 to 0.12 exports none for a jit's static arguments.
        if not hasattr(self._step, "trace"):
            return
        args, kwargs = getattr(executable, "compiled", executable).args_info  # nnx.jit wraps JAX's
        if len(args) + len(kwargs) != len(values):
            raise StepError(
                "jit: `step` is jitted already, with static arguments; expected the function itself"
                " and its options, as in jaxmem.jit(function, static_argnums=...)"
            )

    def _unplanned(self, jitted, values: tuple, error: NoLayersError) -> Compilation:
        """The step as it is, in which jaxmem finds no layer. Raises BudgetError if it does not
        fit.
        """
        target = Target.parse("local")
        limit = parse_budget(self._planning["budget"], target.usable_bytes)

        def compile_within_limit() -> Compiled:
            with backend_for(target) as backend:
                (step,) = StepCompiler(jitted, values, backend).compile_buffers(AS_WRITTEN)
            compiled = step.compiled
            if compiled.total_bytes > limit:
                raise BudgetError(
                    f"jit: the step takes {show_bytes(compiled.total_bytes)} as it is, over the"
                    f" budget of {show_bytes(limit)}, and cannot be planned: {error}",
                    least_bytes=compiled.total_bytes,
                ) from error
            return compiled

        compiled = joined().each(compile_within_limit)  # if it raises in one, it raises in all
        warn(f"jit: the step runs as it is, and is not planned: {error}")
        return Compilation(jitted, None, compiled.executable, self._signature.shapes(values))

    def _jitted(self, step: Callable, args: tuple, kwargs: dict):
        """The step under the jit that its arguments want."""
        if hasattr(step, "trace"):
            return step
        return jitted_for(self._signature.dynamic(args, kwargs), step, **self._options)


class PlannedRelease(PlannedFunction):
    """A released step that jaxmem plans at its first call; made by `jaxmem.jit`.

    If the plan decides the places of states, a call moves the states that are stored elsewhere. The
    originals are deleted.
    """

    def __call__(self, state, batch, key=None):
        return super().__call__(state, batch, *(() if key is None else (key,)))

    def init(self, params, *batch):
        """Makes the first state: `init` of the released step, with its arguments and errors. The
        state is in device memory, unless the plan decides the places of states, and the parameters
        of a whole loss are NumPy arrays. The step is then planned, and each layer's states are made
        where the plan stores them, so that the state need not fit into the device's memory.
        """
        in_host = [isinstance(a, np.ndarray | np.generic) for a in jax.tree.leaves(params)]
        places_states = STATES in self._planning.get("decide", ())
        if not (isinstance(self._step, LossStep) and places_states and in_host and all(in_host)):
            return self._step.init(params, *batch)
        args = (jax.eval_shape(self._step.init, params, *batch), *batch)
        key = self._signature.key(args, {})
        self._last = self._compilation(args, {}, key), None, None
        return self._decided()[1].create(params)

    def joined(self, state):
        """Joins the stacks of a state that a plan moved, as `ReleasedStep.joined`: a form for
        checkpoints that no plan changes. The originals of arrays that move are deleted: go on with
        the result, as in `state = train_step.joined(state)`.

        Raises StepError before the first call, and the errors of `ReleasedStep.joined`.
        """
        latest, plan = self._decided()
        return bound(self._build(plan), latest.shapes).joined(state)

    def _under_plans(self, step):
        return step.with_plan

    def _builder(self, args: tuple, kwargs: dict, called: Callable) -> Callable:
        return self._build

    def _jitted(self, step: Callable, args: tuple, kwargs: dict):
        return jax.jit(step, donate_argnums=0)


def _summary(name: str, plan: Plan, seconds: float) -> str:
    """What was decided, in one line."""
    size = f"{show_bytes(plan.compiled_bytes)} of {show_bytes(plan.budget_bytes)}"
    if plan.as_written or plan.keeps_everything:
        return f"jaxmem.jit: {name} runs as it is, in {size} (planned in {seconds:.0f} s)"
    every = (choice for choices in plan.actions.values() for choice in choices.values())
    counts = collections.Counter(choice.action.value for choice in every)
    if plan.places is not None and plan.places.persist < plan.places.layers:
        moved = plan.places.layers - plan.places.persist
        counts[f"of {plan.places.layers} layers' states in host memory"] = moved
    decided = ", ".join(f"{n} {action}" for action, n in counts.items())
    return (
        f"jaxmem.jit: {name} takes {size} ({show_bytes(plan.baseline_bytes)} without a plan)"
        f" {pace(plan)}: {decided} (planned in {seconds:.0f} s)"
    )
