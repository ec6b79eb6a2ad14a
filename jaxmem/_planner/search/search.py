"""One search for a plan: it solves, compiles what was solved for, learns from the compiled bytes,
and solves again.

A compile takes far longer than a solve, so that a search is bounded by its number of compiles. Its
phases are `begin` (everything kept, the step as written, and a first guess), `refine` (the best
plan that fits), `look_for_lossless` (the best that uses no lossy codec), `refine_by_whole_steps`
(changes that whole steps are compiled for, where that is quick) and `divide` (two groups of layers,
where that is faster). Where everything fits, `hasten` (a plan that is faster than the step without
one) takes the place of `refine`; where nothing does, `compile_least` compiles what takes the least
bytes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxmem._planner.search import candidates
from jaxmem._planner.search.begin import begin, time_baselines
from jaxmem._planner.search.divide import Division, divide
from jaxmem._planner.search.least import corrected, least
from jaxmem._planner.search.state import Search, warn_left_out
from jaxmem._planner.search.step_time import LEAST_GAIN, StepTime
from jaxmem._planner.search.trial import Trial, solve_and_compile
from jaxmem._planner.search.whole_steps import refine_by_whole_steps
from jaxmem._planner.solve.problem import Key, Problem
from jaxmem._planner.solve.solution import Solution
from jaxmem.errors import StepError

# A full compile takes at most this share fewer bytes than its buffer assignment. At most so many
# trials near the budget are compiled fully before the budget is refused.
BUFFERS_DIFFER = 0.05
MOST_PROVEN = 3
ENOUGH = 0.98  # the share of the room of which a plan that uses it is not improved on
# A budget is refused once the two assignments of least bytes exceed it by this share of the room
# beside arguments.
HOPELESS = 0.1
LOSSLESS_COMPILES = 2  # of plans that lose nothing, on top of the others


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search ends with.

    search: what it compiled, plans of divided layers excepted.
    best: the fastest plan that fits, or None.
    division: how the best plan divides layers into groups; None where it does not.
    corrections: what choices take longer in whole steps than the profile says, as `Problem` has
      them; empty where a search did not ask.
    """

    search: Search
    best: Trial | None
    division: Division | None
    corrections: Mapping[Key, float] = dataclasses.field(default_factory=dict)


def find_plan(search: Search, arguments: int) -> Found:
    """Finds the fastest plan within the limits, and shows by compiles that it fits: at most
    `MOST_COMPILES`, and for a TPU the compiles for buffers of `refine_by_whole_steps`.

    arguments: bytes of the step's arguments on one device, as traced.

    Raises BudgetError if no assignment needs as little host memory as `limits.host_bytes`.
    """
    begin(search, arguments)
    time_baselines(search)
    if search.baseline.total <= search.limits.usable_bytes:
        hasten(search)
    else:
        refine(search)
    if not search.fitting and not search.checkpointed_fits:
        compile_least(search)
        if (proven := _proven_least(search)) is not None:
            return Found(search, proven, None)
    if search.careful:
        look_for_lossless(search)
    corrections = refine_by_whole_steps(search)
    # The largest excess seen so far: the bytes of a full compile minus those of its buffers.
    more = 0
    while search.fitting or search.checkpointed_fits:
        # Where compiles end before they are done, only what would be returned is compiled whole. It
        # may take more then, and something else is the best.
        for trial, groups in _ranked(search, more):
            proven = search.compiled_fully(trial)
            if proven is not None and search.limits.allow(proven):
                return Found(search, proven, groups, corrections)
            more = max(more, 1, 0 if proven is None else proven.total - trial.total)
        refine(search)
    return Found(search, None, None)


def look_for_lossless(search: Search) -> None:
    """Looks for a plan that loses nothing, where the fastest of those that fit loses accuracy:
    what is compiled decides whether one fits, not what was expected.
    """
    limits = search.limits
    step_time = search.step_time
    best = min(search.fitting, key=step_time.cautious, default=None)
    if best is None or not best.cost.is_lossy:
        return
    exact = search.without_loss()
    for _ in range(LOSSLESS_COMPILES):
        fitting = [t for t in search.fitting if not t.cost.is_lossy]
        if any(t.total >= ENOUGH * limits.usable_bytes for t in fitting):
            return
        picks = search.solved(candidates.within_budget, exact, 2)
        if not (fresh := _fresh(search, picks)) and not fitting:
            fresh = _fresh(search, search.solved(candidates.nearest, exact))
        if not fresh:
            return
        search.compile_solutions(fresh[:1])


def compile_least(search: Search) -> None:
    """Compiles what takes the least bytes, before a budget is refused."""
    limits = search.limits
    every = search.solved(least, search, search.refused)
    first = every[:2]  # unlike each other, since liveness estimates may be wrong about one
    search.compile_solutions(_fresh(search, first))
    of = lambda picks: [t for t in search.compiled if candidates.is_among(t.actions, picks)]
    if all(_exceeds_by_far(search, t.total) for t in of(first)):
        return
    search.compile_solutions(_fresh(search, every[2:]))
    if not any(limits.allow(t) for t in search.tried):
        # What liveness estimates were off for these corrects them for assignments nearby.
        nearby = search.solved(corrected, search, of(every), search.refused)
        search.compile_solutions(_fresh(search, nearby))


def hasten(search: Search) -> None:
    """Compiles the fastest plan without a limit on device bytes, if the profile calls it faster
    than the step as it is, which fits.
    """

    problem = Problem(search.profile, None, search.limits.host_bytes)
    best = search.solved(candidates.fastest, problem)
    most = search.baseline.cost.seconds - LEAST_GAIN * search.profile.step_seconds
    if best is None or best.cautious_seconds >= most:
        return
    if search.profile.time_source == "roofline":
        return
    if candidates.is_among(best.actions, search.compiled):
        return
    search.compile_solutions([best])


def refine(search: Search) -> None:
    """Solves for the bytes that are left by what was learned, compiles, and learns, until nothing
    is left to gain. What it compiles is added to the search.
    """
    problem = Problem(search.profile, None, search.limits.host_bytes)
    # No assignment of tags is faster than the best one without a limit on device bytes.
    best = search.solved(candidates.fastest, problem)
    least_seconds = best.cautious_seconds if best else 0.0
    solve_and_compile(search, lambda: _next_solutions(search, least_seconds))


def _next_solutions(search: Search, least_seconds: float) -> list[Solution]:
    """The solutions that `refine` compiles next, at most as many as compile side by side.

    least_seconds: seconds of the best assignment without a limit on device bytes.
    """
    limits, width = search.limits, search.steps.backend.width
    within, model = search.within_budget, search.model()
    # A plan that an earlier search saw fit is compiled before anything is called enough:
    # else a search with more history could return a slower plan than one with less.
    earlier = candidates.recalled(search, search.problem(model), search.step_time.cautious)
    # A plan that fills the budget, or is as fast as one without a limit, ends the search. One
    # of unknown worth, found by small changes, does not by filling it.
    done = any(
        (t.total >= ENOUGH * limits.usable_bytes and t.gap < math.inf)
        or t.cost.cautious_seconds <= least_seconds
        for t in within
    )
    if done and earlier is None:
        return []
    # Candidates in the order in which they are worth a compile. One more is solved for than
    # compiles go side by side, since some may have been compiled before.
    picks = [] if earlier is None else [earlier]
    picks += search.solved(candidates.within_budget, search, width + 1)
    fresh = _fresh(search, picks)
    # Nothing fits yet, and no solution is expected to: try what is nearest to the budget.
    if not within and not fresh:
        smallest, *_ = search.solved(least, search, search.refused)
        if _exceeds_by_far(search, search.expected(smallest)):
            return []  # compiles show whether it does: `least`
        fresh = _fresh(search, search.solved(candidates.nearest, search))
    return fresh[: min(width, search.compiles_left)]


def _exceeds_by_far(search: Search, total: int) -> bool:
    """Whether so many bytes are over the room by much."""
    room = search.limits.usable_bytes
    return total > room + HOPELESS * (room - search.static)


def _fresh(search: Search, picks: list[Solution]) -> list[Solution]:
    """Those that were neither compiled nor refused by XLA."""
    fresh: list[Solution] = []
    for pick in picks:
        known = [t.actions for t in search.compiled] + search.refused
        known += [other.actions for other in fresh]
        if not any(candidates.alike(pick.actions, actions) for actions in known):
            fresh.append(pick)
    return fresh


def _proven_least(search: Search) -> Trial | None:
    """What fits once it is compiled whole, of what takes the least buffers, which do not fit."""
    limits = search.limits
    near = dataclasses.replace(limits, usable_bytes=int((1 + BUFFERS_DIFFER) * limits.usable_bytes))
    if not search.steps.backend.assigns or search.fitting or search.checkpointed_fits:
        return None
    own = [] if search.checkpointed is None else [search.checkpointed]
    likely = [t for t in (*search.compiled, *own) if near.allow(t)]
    for trial in sorted(likely, key=lambda t: t.total)[:MOST_PROVEN]:
        try:
            proven = search.compiled_fully(trial)
        except StepError as error:  # of everything kept: the others may still fit
            warn_left_out(trial.actions, error)
            continue
        if proven is not None and limits.allow(proven):
            return proven
    return None


def _ranked(search: Search, more: int) -> list[tuple[Trial, Division | None]]:
    """What a search may return, the best first, with how it divides layers.

    more: the largest excess of a full compile over its buffer assignment that was seen.
    """
    limits, step_time = search.limits, search.step_time
    found: list[tuple[Trial, Division | None]] = []
    if search.fitting:
        fits = limits.allow(search.baseline)
        # Each costs a whole compile, which what is as near to the room would fail in as well.
        likely = [t for t in search.fitting if t.total + more <= limits.usable_bytes]
        best = min(likely or search.fitting, key=lambda t: (step_time.cautious(t), t.total))
        # A step that fits stays as it is unless a plan is faster by what is worth a word. Times
        # that are computed from a device's rates are too rough to say so.
        rough = search.profile.time_source == "roofline"
        if fits and (rough or step_time.cautious(best) > (1 - LEAST_GAIN) * step_time.base):
            best = search.baseline
        best = _worth_its_loss(search, step_time, best, likely or search.fitting)
        alone = fits or more > 0
        divided, division = (best, None) if alone else divide(search, best, step_time)
        if _worth_its_loss(search, step_time, divided, [best]) is best:
            divided, division = best, None
        found = [(divided, division), (best, None)][divided is best :]
    if (own := search.checkpointed_fits) is not None:
        worth = (1 - LEAST_GAIN) * step_time.of(own)
        faster = [
            each
            for each in found
            if step_time.cautious(each[0]) <= worth
            and _worth_its_loss(search, step_time, each[0], [own]) is not own
        ]
        found = [*faster, (own, None), *(each for each in found if each not in faster)]
    return found


def _worth_its_loss(
    search: Search, step_time: StepTime, best: Trial, others: Sequence[Trial]
) -> Trial:
    """`best`, or if it is lossy and gains less than a user notices, the fastest lossless trial of
    `others`.
    """
    exact = [t for t in others if not t.cost.is_lossy]
    if not (search.careful and best.cost.is_lossy and exact):
        return best
    other = min(exact, key=lambda t: (step_time.of(t), t.total))
    return best if step_time.is_worth_losing(best, other) else other
