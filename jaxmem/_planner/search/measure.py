"""Runs a search's plans, and policies that a user would write by hand, on the device at hand, and
takes the fastest. Runs of earlier searches correct the prices of a profile.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from jaxmem._core.actions import AS_WRITTEN, EVERYTHING_KEPT, Actions
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database
from jaxmem._core.profile import Profile
from jaxmem._core.progress import LOG
from jaxmem._cost.profile.doubt import MIN_GAIN_DEFAULT
from jaxmem._cost.profile.options import recoded
from jaxmem._cost.profile.times import is_beside_training
from jaxmem._planner.search import candidates
from jaxmem._planner.search.candidates import hand_policies
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._planner.search.factors import NOISE, Factors, fitted, rescaled
from jaxmem._planner.search.history import Comparison, History
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import worth_its_loss
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.running import CannotRun
from jaxmem._target.devices.target import Target
from jaxmem.errors import StepError, TargetError

# Factors of prices with which the program is solved again, for plans that are best if the profile's
# prices are wrong by these factors.
DOUBTED = (Factors(recompute=0.5), Factors(recompute=2.0), Factors(codec=2.0))
CORRECTIONS = 2  # how often prices are corrected, and the program is solved again
CORRECTED = "a plan by corrected prices"
# A policy is not compiled if its predicted bytes exceed the usable bytes by more than this share.
OVER = 0.1
CONFIRM_SECONDS = 3.0  # seconds for runs of a plan and of the step without it, which fits


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of a compiled step.

    name: the step's name in the plan's table, such as "everything kept".
    trial: the compiled step.
    rounds: the seconds of each round. In a round, all compared steps run once, one after the other.
    """

    name: str
    trial: Trial
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def run_and_correct(search: Search, seconds: float) -> list[Runs]:
    """Runs the most promising steps in alternation for `seconds`, and returns their runs. The
    fastest measured trial becomes the search's best plan.

    These steps run: the best plan, everything kept and the step as written if they fit, the
    policies of `hand_policies` that fit, and the plans that would be best under other prices
    (`DOUBTED`). So the returned plan is no slower than any of them, by the measurements. Then the
    measured differences correct the prices, and the program is solved with the corrected prices. A
    new solution runs in alternation with the fastest step so far. This is repeated until the
    solution is not new, at most `CORRECTIONS` times.

    Raises CannotRun if the step does not run on the device at hand.
    """
    named = _with_unplanned(search)
    others = hand_policies(search.profile) | _solved_otherwise(search)
    for name, actions in others.items():
        if candidates.is_among(actions, list(named.values())):
            continue
        if (trial := _compiled(search, actions)) is not None:
            named[name] = trial
    runs = _run(search, named, seconds / 2)
    if not runs:
        return []
    for number in range(CORRECTIONS):
        fastest = min(runs, key=lambda run: run.median)
        actions = _solved_with(search, learned(search.profile, search.history))
        if actions is None or candidates.is_among(actions, [run.trial for run in runs]):
            break
        if (trial := _compiled(search, actions)) is None:
            break
        pair = {fastest.name: fastest.trial, f"{CORRECTED} {number + 1}": trial}
        both = _run(search, pair, seconds / 2 / CORRECTIONS)
        if len(both) < 2:  # the device has no memory for one of the two steps now
            break
        fastest_again, new = both
        # The speed of a machine changes over minutes. So the new seconds are scaled by the ratio of
        # the fastest step's seconds, before and now.
        pace = fastest.median / fastest_again.median
        runs.append(dataclasses.replace(new, rounds=tuple(pace * s for s in new.rounds)))
    _select_fastest(search, runs)
    return runs


def confirm_by_runs(search: Search) -> list[Runs]:
    """Runs the best plan in alternation with everything kept and the step as written, if one of
    them fits, and returns their runs. The fastest measured trial becomes the search's best plan.

    A step that fits without a plan needs no plan that is only predicted to be faster. XLA fuses the
    pieces of a whole step otherwise than a piece that is timed alone. Returns no runs if the step
    without a plan was not timed.
    """
    named = _with_unplanned(search)
    if len(named) < 2 or search.step_time.source != "measured" or is_beside_training():
        return []
    runs = _run(search, named, CONFIRM_SECONDS)
    if runs:
        _select_fastest(search, runs)
    return runs


def _with_unplanned(search: Search) -> dict[str, Trial]:
    """The best plan, and everything kept and the step as written if they fit, by their names. The
    best plan may be one of the latter two.
    """
    assert search.best is not None
    LOG.info("running the likely fastest steps")
    kept = search.baseline if search.baseline in search.fitting else None
    unplanned = {EVERYTHING_KEPT: kept, "the step as written": search.checkpoints_fit}
    named = {name: trial for name, trial in unplanned.items() if trial is not None}
    if all(trial is not search.best for trial in named.values()):
        return {"the plan": search.best} | named
    return named


def _select_fastest(search: Search, runs: Sequence[Runs]) -> None:
    """The fastest measured trial becomes the search's best plan."""
    best = fastest_run(search.codecs_by_default, runs).trial
    search.divided_problem = search.divided_problem if best is search.best else None
    search.best = best


def fastest_run(codecs_by_default: bool, runs: Sequence[Runs]) -> Runs:
    """The runs of the fastest step. If the fastest step is lossy, and if it gains less than a user
    notices plus the spread of the rounds, the runs of the fastest lossless step.

    codecs_by_default: whether a lossy step must gain at least `MIN_GAIN_DEFAULT` of the step, as
      `Search.codecs_by_default`.
    """
    best = min(runs, key=lambda run: run.median)
    if not (codecs_by_default and best.trial.cost.is_lossy):
        return best

    def noticed(other: Runs) -> float:
        spreads = (upper - lower for lower, _, upper in map(quartiles, (best.rounds, other.rounds)))
        return MIN_GAIN_DEFAULT * other.median + sum(spreads) / 2

    exact = [run for run in runs if not run.trial.cost.is_lossy]
    return worth_its_loss(best, exact, lambda run: run.median, noticed)


def _run(search: Search, named: dict[str, Trial], seconds: float) -> list[Runs]:
    """Runs the steps that can run on the device at hand, in alternation, and stores the runs in the
    history.
    """
    rounds = search.compiler.run(*(t.step for t in named.values()), seconds=seconds)
    runs = [Runs(n, t, tuple(r)) for (n, t), r in zip(named.items(), rounds) if r]
    _remember(search, runs)
    return runs


def _remember(search: Search, runs: list[Runs]) -> None:
    """Stores in the history the difference between each step and the first one, from the
    differences of each round. The step as written is left out: no choices of tags describe its
    checkpoints.
    """
    runs = [run for run in runs if run.trial.actions != AS_WRITTEN]
    for run in runs[1:]:
        differences = [a - b for a, b in zip(run.rounds, runs[0].rounds)]
        lower, median, upper = quartiles(differences)
        noise = NOISE * runs[0].median + (upper - lower) / math.sqrt(len(differences))
        search.history.remember_run(
            Comparison(run.trial.actions, runs[0].trial.actions, median, noise)
        )


def learned(profile: Profile, earlier: History) -> Factors:
    """The factors for which the prices of a step are nearest to the runs of earlier searches."""
    observed = []
    for run in earlier.recall_runs():
        cost = candidates.price_of(profile, recoded(profile, run.first)[0])
        other = candidates.price_of(profile, recoded(profile, run.other)[0])
        if cost is not None and other is not None:
            observed.append(Comparison(cost, other, run.seconds, run.noise))
    return fitted(observed)


def _solved_otherwise(search: Search) -> dict[str, Actions]:
    """The best assignments under other prices (`DOUBTED`), by their names."""
    solved = {f: _solved_with(search, f) for f in DOUBTED}
    return {f"a plan if {f}": actions for f, actions in solved.items() if actions is not None}


def _solved_with(search: Search, factors: Factors) -> Actions | None:
    """The best assignment under prices multiplied by `factors`; None if no assignment fits."""
    problem = search.problem(search.model())
    other = dataclasses.replace(problem, profile=rescaled(search.profile, factors))
    solution = candidates.solve_fastest(other)
    return None if solution is None else solution.actions


def _compiled(search: Search, actions: Actions) -> Trial | None:
    """Compiles an assignment, and returns its trial; None if the assignment does not fit."""
    limits = search.limits
    for trial in search.trials:
        if trial.step.compiled.executable is not None and candidates.is_among(actions, [trial]):
            return trial if trial in search.fitting else None
    solution = ActionSolution.of(search.problem(search.model()), actions)
    over = search.expected(solution) > (1 + OVER) * limits.usable_bytes
    if over or solution.host_bytes > limits.host_bytes:
        return None
    trials = search.compile_solutions([solution])
    return next((trial for trial in trials if limits.allow(trial)), None)


def quartiles(rounds: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(rounds) < 2:
        return rounds[0], rounds[0], rounds[0]
    lower, median, upper = statistics.quantiles(rounds, n=4, method="inclusive")
    return lower, median, upper


def check_measure(seconds, target: Target) -> None:
    """Raises StepError if `measure` is not a number of seconds, and TargetError if the target is
    not at hand.
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


def corrected_by_runs(profile: Profile, history: History) -> tuple[Profile, tuple[str, ...]]:
    """Returns the profile with prices that are corrected by earlier searches' runs of whole steps,
    and a note for the user.
    """
    factors = learned(profile, history)
    if factors == Factors():
        return profile, ()
    note = f"times of pieces are corrected by earlier runs of whole steps, in which {factors}"
    return rescaled(profile, factors), (note,)


def remember_run(build, args: tuple, actions: Actions, other: Actions, seconds, noise) -> None:
    """Stores the measured difference of a step under two assignments, for later plans of the step
    (`corrected_by_runs`).

    build, args: as for `jaxmem.plan`; the device is the device at hand.
    actions, other: the two assignments.
    seconds, noise: the seconds by which the step took longer under `actions`, and their error
      bound.
    """
    with backend_for(Target.parse("local"), Database()) as backend:
        traced = StepCompiler(build, args, backend).trace(Assignment.nothing())
        History(backend, traced.jaxpr).remember_run(Comparison(actions, other, seconds, noise))


def compare_by_runs(search: Search, seconds: float | None) -> tuple[list[Runs], tuple[str, ...]]:
    """Runs steps as `run_and_correct` does, or as `confirm_by_runs` if `seconds` is None. Returns
    the runs, and notes for the user.
    """
    why: object = "there is no memory for the step"
    try:
        runs = confirm_by_runs(search) if seconds is None else run_and_correct(search, seconds)
    except CannotRun as error:
        runs, why = [], error
    return runs, () if runs or seconds is None else (f"nothing was run for `measure`: {why}",)
