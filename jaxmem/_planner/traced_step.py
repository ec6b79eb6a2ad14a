"""Traces, checks and profiles a step for a plan."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax

from jaxmem._core.assignment import Assignment
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.blocks.policies import check_plan_is_passed_on, has_policies, own_checkpoints
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile as make_profile
from jaxmem._planner.advice import arguments_exceed
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.estimates import Estimates
from jaxmem._planner.search.history import History
from jaxmem._planner.search.measure import corrected_by_runs
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Limits
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.compiled.compiled import check_arguments
from jaxmem._target.devices.target import Target
from jaxmem._trace.arguments import argument_bytes, batch_axes
from jaxmem._trace.jaxpr import equations, line_of
from jaxmem._trace.stand_in import calls_python

SHOWN = 3  # source lines of checkpoints that a note names


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step that was traced, checked and profiled.

    compiler: compiles the step under a plan.
    planned: whether the step as its author wrote it has policies of jaxmem.
    traced: the step with every tag recomputed, so that the backward of each block contains the
      block's whole forward.
    arguments: bytes of the step's arguments on one device.
    shards: the number of devices over which a block's tensors are divided. Traced shapes are the
      shapes before a mesh divides them.
    profile: the blocks of the step, with their bytes and seconds.
    wider: makes the profile in which values that `checkpoint_name` names may be compressed too.
    history: the compiles and the runs of earlier searches.
    history_as_written: earlier compiles of the step as written, if the step has checkpoints of its
      own; else None.
    notes: sentences for the user.
    seconds: seconds that tracing and profiling took.
    """

    compiler: StepCompiler
    planned: bool
    traced: jax.stages.Traced
    arguments: int
    shards: int
    profile: Profile
    wider: Callable[[], Profile]
    history: History
    history_as_written: History | None
    notes: tuple[str, ...]
    seconds: float

    @property
    def target(self) -> Target:
        return self.compiler.backend.target

    def search(self, limits: Limits, codecs_by_default: bool = False) -> Search:
        """A search for a plan of the step. `codecs_by_default` is as in `Allowed`."""
        return Search(
            self.profile,
            limits,
            self.compiler,
            self.history,
            Estimates(self.compiler, self.profile, self.shards),
            self.history_as_written,
            self.planned,
            codecs_by_default,
            profile_seconds=self.seconds,
        )


def read_step(
    compiler: StepCompiler,
    limits: Limits | None,
    allowed: Allowed,
    pricing: Pricing | None = None,
) -> TracedStep:
    """Traces, checks and profiles a step.

    compiler: traces the step. The traced step has a compiler of its own, which knows the facts that
      were read.
    limits: the bytes that a plan may take; None for no limit.
    allowed: the actions and codecs that get prices.
    pricing: the source of the times of pieces; None for the compiler's backend.

    Raises BudgetError if the arguments alone exceed the limits. Raises TargetError if the target
    cannot read arguments in host memory. Raises StepError and TagError as `jaxmem.plan` does.
    """
    args, backend, start = compiler.args, compiler.backend, time.perf_counter()
    target = backend.target
    LOG.info("tracing the step, and timing its pieces")
    traced = compiler.trace(Assignment.nothing())
    check_arguments(target, traced)
    arguments = argument_bytes(traced, args, target.devices)
    if limits is not None and arguments > limits.usable_bytes:
        raise arguments_exceed(arguments, limits, target, traced, args)
    as_written = compiler.trace(Assignment.unchanged()).jaxpr
    check_plan_is_passed_on(traced.jaxpr.jaxpr, as_written.jaxpr)
    planned = has_policies(as_written.jaxpr)
    has_checkpoints = bool(own_checkpoints(as_written.jaxpr))
    axes = batch_axes(traced, args, target.devices)
    shards = math.prod(axes.values())
    price = functools.partial(
        make_profile, traced.jaxpr, pricing or backend, axes=axes, database=backend.database
    )
    history = History(backend, traced.jaxpr)
    own = History(backend, as_written) if has_checkpoints and not planned else None
    profile, notes = corrected_by_runs(price(allowed=allowed), history)
    made = {*profile.idle_blocks, *getattr(compiler.build, "labels", list)()}
    idle = tuple(sorted(made.difference(block.name for block in profile.blocks)))
    profile = dataclasses.replace(profile, idle_blocks=idle)
    notes += _undecided(compiler) if has_checkpoints else ()
    notes += _left_out(traced.jaxpr.jaxpr, target)
    compiler = compiler.with_facts(has_checkpoints, profile.idle_blocks)
    # The permissions under `actions="all"`: codecs for values that `checkpoint_name` names too.
    for_all = dataclasses.replace(allowed, named_values=allowed.actions, codecs_by_default=False)
    wider = lambda: corrected_by_runs(price(allowed=for_all), history)[0]
    seconds = time.perf_counter() - start
    return TracedStep(
        compiler, planned, traced, arguments, shards, profile, wider, history, own, notes, seconds
    )


def _left_out(jaxpr, target: Target) -> tuple[str, ...]:
    """A note for the user about calls of Python that are not compiled for an absent target."""
    calls = dict.fromkeys(line_of(eqn) for eqn in equations(jaxpr) if calls_python(eqn))
    if target.local or not calls:
        return ()
    return (
        f"the calls of Python at {', '.join([*calls][:SHOWN])} are left out of what is compiled for"
        f" {target}, since JAX compiles them for devices at hand only",
    )


def _undecided(compiler: StepCompiler) -> tuple[str, ...]:
    """A note for the user about checkpoints that remain under every plan, if the step has any. The
    step with everything kept has them too.
    """
    lines = own_checkpoints(compiler.trace(Assignment.everything()).jaxpr.jaxpr)
    if not lines:
        return ()
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return (
        "under every plan, and with everything kept, the step has checkpoints that no plan decides:"
        f" {', '.join(lines[:SHOWN])}{more}",
    )
