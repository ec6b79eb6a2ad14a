"""Runs a search's plans, and the policies that one would pick by hand, on the device at hand, and
takes the fastest. Runs of earlier searches correct the prices of a profile.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from jaxmem._core.actions import AS_WRITTEN, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.doubt import WORTH
from jaxmem._cost.profile.options import recoded
from jaxmem._planner.search import candidates
from jaxmem._planner.search.candidates import hand_policies
from jaxmem._planner.search.factors import NOISE, Factors, fitted, rescaled
from jaxmem._planner.search.history import Comparison, History
from jaxmem._planner.search.search import Found
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.solution import priced
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.running import CannotRun
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import StepError, TargetError

# Prices under which the program is solved again, for plans that are best if the profile errs.
DOUBTED = (Factors(recompute=0.5), Factors(recompute=2.0), Factors(codec=2.0))
CORRECTIONS = 2  # how often prices are corrected, and the program solved again
CORRECTED = "a plan by corrected prices"
# A policy whose bytes are predicted to be over the room by more than this share is not compiled.
OVER = 0.1


@dataclasses.dataclass(frozen=True)
class Runs:
    """A compiled step that was run.

    name: what it is, in words.
    trial: what it compiled to.
    rounds: the seconds of each round. Those of one number belong together: they were run one after
      the other.
    """

    name: str
    trial: Trial
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def fastest_measured(found: Found, seconds: float) -> tuple[Found, list[Runs]]:
    """Returns what was found with the fastest in place of the best, and all that was run: in turns,
    for `seconds`.

    Run are the best plan, the step as it is if it fits, those of `hand_policies` that fit, and
    plans that would be best if the profile's prices were others (`DOUBTED`). So what is returned is
    no slower than any of these, as far as the clock tells. Then prices are corrected by what was
    run, and what is best by them runs beside the fastest, until that is no new plan.

    Raises CannotRun where the step does not run here.
    """
    search = found.search
    assert found.best is not None
    named = {"the plan": found.best}
    if search.baseline in search.fitting and found.best is not search.baseline:
        named["everything kept"] = search.baseline
    own = search.checkpointed_fits
    if own is not None and found.best is not own:
        named["the step as written"] = own
    wanted = hand_policies(search.profile) | _solved_otherwise(search)
    for name, actions in wanted.items():
        if candidates.is_among(actions, list(named.values())):
            continue
        if (trial := _compiled(search, actions)) is not None:
            named[name] = trial
    runs = _run(search, named, seconds / 2)
    if not runs:
        return found, []
    for number in range(CORRECTIONS):
        fastest = min(runs, key=lambda run: run.median)
        actions = _solved_with(search, learned(search.profile, search.history))
        if actions is None or candidates.is_among(actions, [run.trial for run in runs]):
            break
        if (trial := _compiled(search, actions)) is None:
            break
        pair = {fastest.name: fastest.trial, f"{CORRECTED} {number + 1}": trial}
        both = _run(search, pair, seconds / 2 / CORRECTIONS)
        if len(both) < 2:  # there is no memory for one of them now
            break
        beside, new = both
        # Seconds wander: those of another minute count as many times the fastest one's.
        pace = fastest.median / beside.median
        runs.append(dataclasses.replace(new, rounds=tuple(pace * s for s in new.rounds)))
    best = fastest_of(search.careful, runs).trial
    division = found.division if best is found.best else None
    return dataclasses.replace(found, best=best, division=division), runs


def fastest_of(careful: bool, runs: Sequence[Runs]) -> Runs:
    """The fastest by the clock; where that loses accuracy, and by less than one would notice beyond
    the spread of rounds, the fastest that does not.

    careful: whether a loss must be noticed, as `Search` has it.
    """
    best = min(runs, key=lambda run: run.median)
    exact = [run for run in runs if not run.trial.cost.is_lossy]
    if not (careful and best.trial.cost.is_lossy and exact):
        return best
    other = min(exact, key=lambda run: run.median)
    spread = sum(upper - lower for lower, _, upper in (quartiles(r.rounds) for r in (best, other)))
    noticed = WORTH * other.median + spread / 2
    return best if other.median - best.median >= noticed else other


def _run(search: Search, named: dict[str, Trial], seconds: float) -> list[Runs]:
    """The steps that run here, run in turns, which is remembered."""
    rounds = search.steps.run(*(t.step for t in named.values()), seconds=seconds)
    runs = [Runs(n, t, tuple(r)) for (n, t), r in zip(named.items(), rounds) if r]
    if runs:
        _remember(search, runs)
    return runs


def _remember(search: Search, runs: list[Runs]) -> None:
    """Writes down by how much each step took longer than the first, round by round. The step as
    written is left out: no choices of tags stand for its own checkpoints.
    """
    runs = [run for run in runs if run.trial.actions != AS_WRITTEN]
    if not runs:
        return
    first, *others = runs
    for run in others:
        apart = [a - b for a, b in zip(run.rounds, first.rounds)]
        lower, median, upper = quartiles(apart)
        noise = NOISE * first.median + (upper - lower) / math.sqrt(len(apart))
        search.history.remember_run(
            Comparison(run.trial.actions, first.trial.actions, median, noise)
        )


def learned(profile: Profile, earlier: History) -> Factors:
    """The factors by which the prices of a step come nearest to what earlier searches measured."""
    observed = []
    for run in earlier.recall_runs():
        cost = candidates.price_of(profile, recoded(profile, run.first)[0])
        other = candidates.price_of(profile, recoded(profile, run.other)[0])
        if cost is not None and other is not None:
            observed.append(Comparison(cost, other, run.seconds, run.noise))
    return fitted(profile, observed) if observed else Factors()


def _solved_otherwise(search: Search) -> dict[str, Actions]:
    """The best assignments if the profile's prices were others, by what they are called."""
    solved = {f: _solved_with(search, f) for f in DOUBTED}
    return {f"a plan if {f}": actions for f, actions in solved.items() if actions is not None}


def _solved_with(search: Search, factors: Factors) -> Actions | None:
    """The best assignment under prices that are multiplied, or None where none fits."""
    problem = search.problem(search.model())
    other = dataclasses.replace(problem, profile=rescaled(search.profile, factors))
    solution = candidates.fastest(other)
    return None if solution is None else solution.actions


def _compiled(search: Search, actions: Actions) -> Trial | None:
    """An assignment that fits, compiled; None for one that does not."""
    limits = search.limits
    for trial in search.compiled:
        if trial.step.compiled.executable is not None and candidates.is_among(actions, [trial]):
            return trial if trial in search.fitting else None
    solution = priced(search.problem(search.model()), actions)
    over = search.expected(solution) > (1 + OVER) * limits.usable_bytes
    if over or solution.host_bytes > limits.host_bytes:
        return None
    found = search.compile_solutions([solution])
    return next((trial for trial in found if limits.allow(trial)), None)


def quartiles(rounds: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one."""
    if len(rounds) < 2:
        return rounds[0], rounds[0], rounds[0]
    lower, median, upper = statistics.quantiles(rounds, n=4, method="inclusive")
    return lower, median, upper


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
