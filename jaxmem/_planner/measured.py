"""What `jaxmem.plan` does with runs of whole steps: asks for them, and learns from earlier ones."""

import math

from jaxmem._core.actions import Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._planner.search.factors import Factors, rescaled
from jaxmem._planner.search.history import Comparison, History
from jaxmem._planner.search.measure import Runs, fastest_measured, learned
from jaxmem._planner.search.search import Found
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.running import CannotRun
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import StepError, TargetError


def check_measure(seconds, target: Target) -> None:
    """Raises StepError if `measure` is no number of seconds, TargetError if the step would not run
    on the target.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:
        raise StepError(
            f"plan: `measure` is {seconds!r}; expected the seconds that steps may be run for, such"
            " as 30"
        )
    if not target.local:
        raise TargetError(
            f"plan: `measure` is {seconds}, and the target is {str(target)!r}: steps are run on the"
            " device at hand alone; leave `measure` out, or plan for target='local' there"
        )


def corrected(profile: Profile, history: History) -> tuple[Profile, tuple[str, ...]]:
    """Returns the profile with its prices as runs of whole steps in earlier searches taught, and
    what to tell the user of it.
    """
    factors = learned(profile, history)
    if factors == Factors():
        return profile, ()
    note = f"times of pieces are corrected by earlier runs of whole steps, in which {factors}"
    return rescaled(profile, factors), (note,)


def remember_run(build, args: tuple, actions: Actions, other: Actions, seconds, noise) -> None:
    """Writes down by how much a step took longer under some actions than under others, on the
    device at hand, for later plans of it: see `corrected`.
    """
    with backend_for(Target.parse("local"), Database()) as backend:
        _, traced = trace(build, Assignment.nothing(), args)
        History(backend, traced.jaxpr).remember_run(Comparison(actions, other, seconds, noise))


def measured(found: Found, seconds: float) -> tuple[Found, list[Runs], tuple[str, ...]]:
    """Returns what was found with the fastest by the clock as its best, what was run, and what to
    tell the user of it.
    """
    LOG.info("running what may be fastest, for %g s", seconds)
    try:
        fastest, runs = fastest_measured(found, seconds)
    except CannotRun as why:
        return found, [], (f"nothing was run for `measure`: {why}",)
    if not runs:
        return found, [], ("nothing was run for `measure`: there is no memory for the step",)
    return fastest, runs, ()
