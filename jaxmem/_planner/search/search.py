"""One search for a plan: it solves, compiles what was solved for, learns from the compiled bytes,
and solves again.

A compile takes far longer than a solve, so that a search is bounded by its number of compiles. Its
phases are `begin` (everything kept, the step as written, and a first guess), `refine` (the best
plan that fits), `without_loss` (the best that uses no lossy codec), `polish` (changes that whole
steps are compiled for, where that is quick) and `divide` (two groups of layers, where that is
faster). Where everything fits, `hasten` (a plan that is faster than the step without one) takes the
place of `refine`; where nothing does, `least` compiles what takes the least bytes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxmem._planner.search.begin import begin, time_baselines
from jaxmem._planner.search.divide import Division
from jaxmem._planner.search.polish import polish
from jaxmem._planner.search.rounds import WORTH, Rounds
from jaxmem._planner.solve.problem import Key
from jaxmem._planner.trials.clock import Clock, clock_of
from jaxmem._planner.trials.setting import Setting, warn_left_out
from jaxmem._planner.trials.trial import Trial
from jaxmem._planner.trials.trials import Trials
from jaxmem.errors import StepError

# By what share at most a whole compile is known to take less than the buffers that were assigned,
# and of how many a whole compile may find out, before a budget is refused.
BUFFERS_DIFFER = 0.05
MOST_PROVEN = 3


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search ends with.

    trials: what it compiled, plans of divided layers excepted.
    best: the fastest plan that fits, or None.
    division: how the best plan divides layers into groups; None where it does not.
    solve_seconds: what solving took.
    corrections: what choices take longer in whole steps than the profile says, as `Problem` has
      them; empty where a search did not ask.
    """

    trials: Trials
    best: Trial | None
    division: Division | None
    solve_seconds: float
    corrections: Mapping[Key, float] = dataclasses.field(default_factory=dict)


def search(setting: Setting, arguments: int) -> Found:
    """Finds the fastest plan within the limits that at most `MOST_COMPILES` compiles show to fit.

    arguments: bytes of the step's arguments on one device, as traced.

    Raises BudgetError if no assignment needs as little host memory as `host_room`.
    """
    rounds = Rounds(setting, begin(setting, arguments))
    trials = rounds.trials
    time_baselines(setting, trials)
    fits = trials.baseline.total <= setting.limits.room
    if fits:
        rounds.hasten()
    else:
        rounds.refine()
    if not trials.fitting and not trials.checkpointed_fits:
        rounds.least()
        if (proven := _proven_least(setting, trials)) is not None:
            return Found(trials, proven, None, rounds.solve_seconds)
    if setting.careful:
        rounds.without_loss()
    corrections = polish(setting, trials)
    more = 0  # bytes that something which did not fit took, compiled whole, beyond its buffers
    while trials.fitting or trials.checkpointed_fits:
        # Where compiles end before they are done, only what would be returned is compiled whole. It
        # may take more then, and something else is the best.
        for trial, groups in _ranked(rounds, more):
            proven = trials.proven(trial, setting)
            if proven is not None and setting.limits.allow(proven):
                return Found(trials, proven, groups, rounds.solve_seconds, corrections)
            more = max(more, 1, 0 if proven is None else proven.total - trial.total)
        rounds.refine()
    return Found(trials, None, None, rounds.solve_seconds)


def _proven_least(setting: Setting, trials: Trials) -> Trial | None:
    """What fits once it is compiled whole, of what takes the least buffers, which do not fit."""
    limits = setting.limits
    near = dataclasses.replace(limits, room=int((1 + BUFFERS_DIFFER) * limits.room))
    if not setting.steps.backend.assigns or trials.fitting or trials.checkpointed_fits:
        return None
    own = [] if trials.checkpointed is None else [trials.checkpointed]
    likely = [t for t in (*trials.compiled, *own) if near.allow(t)]
    for trial in sorted(likely, key=lambda t: t.total)[:MOST_PROVEN]:
        try:
            proven = trials.proven(trial, setting)
        except StepError as error:  # of everything kept: the others may still fit
            warn_left_out(trial.actions, error)
            continue
        if proven is not None and limits.allow(proven):
            return proven
    return None


def _ranked(rounds: Rounds, more: int) -> list[tuple[Trial, Division | None]]:
    """What a search may return, the best first, with how it divides layers.

    more: bytes that something which did not fit took, compiled whole, beyond its buffers.
    """
    setting, trials = rounds.setting, rounds.trials
    limits, clock = setting.limits, clock_of(trials, setting.steps.backend.target)
    found: list[tuple[Trial, Division | None]] = []
    if trials.fitting:
        fits = limits.allow(trials.baseline)
        # Each costs a whole compile, which what is as near to the room would fail in as well.
        likely = [t for t in trials.fitting if t.total + more <= limits.room]
        best = min(likely or trials.fitting, key=lambda t: (clock.cautious(t), t.total))
        # A step that fits stays as it is unless a plan is faster by what is worth a word. Times
        # that are computed from a device's rates are too rough to say so.
        rough = setting.profile.time_source == "roofline"
        if fits and (rough or clock.cautious(best) > (1 - WORTH) * clock.base):
            best = trials.baseline
        best = _worth_its_loss(setting, clock, best, likely or trials.fitting)
        alone = fits or more > 0
        divided, division = (best, None) if alone else rounds.divide(best, clock)
        if _worth_its_loss(setting, clock, divided, [best]) is best:
            divided, division = best, None
        found = [(divided, division), (best, None)][divided is best :]
    if (own := trials.checkpointed_fits) is not None:
        worth = (1 - WORTH) * clock.of(own)
        faster = [
            each
            for each in found
            if clock.cautious(each[0]) <= worth
            and _worth_its_loss(setting, clock, each[0], [own]) is not own
        ]
        found = [*faster, (own, None), *(each for each in found if each not in faster)]
    return found


def _worth_its_loss(setting: Setting, clock: Clock, best: Trial, others: Sequence[Trial]) -> Trial:
    """`best`, or where that loses accuracy for less than is noticed, the fastest of `others` that
    does not.
    """
    exact = [t for t in others if not t.cost.is_lossy]
    if not (setting.careful and best.cost.is_lossy and exact):
        return best
    other = min(exact, key=lambda t: (clock.of(t), t.total))
    return best if clock.is_worth_losing(best, other) else other
