"""One search for a plan: solves the problem, compiles the solutions, fits the memory model to the
compiled bytes, and solves again.

A compile takes far longer than a solve, so that the number of compiles limits a search. The phases
of a search are:

- `compile_baseline` compiles everything kept, the step as written, and a first guess.
- `refine` finds the best plan that fits.
- `look_for_lossless` finds the best plan without a lossy codec.
- `refine_by_whole_steps` compiles changes of the best plan for buffers, if the target can.
- `divide` finds two groups of layers, if they are faster.
- `faster_in_spans` finds layers in spans, if they are faster.

If everything kept fits, `compile_unlimited` takes the place of `refine`: it compiles the plan that
is fastest without a limit on device bytes. If no plan fits, `compile_least` compiles the
assignments of least bytes, and `compile_in_spans` layers in spans.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxmem._core.groups import divisible
from jaxmem._planner.search import candidates
from jaxmem._planner.search.baseline import compile_baseline, time_baselines
from jaxmem._planner.search.divide import divide
from jaxmem._planner.search.least import least, near_least
from jaxmem._planner.search.spans import compile_in_spans, faster_in_spans, problem_in_spans
from jaxmem._planner.search.state import Search, warn_of_refusal
from jaxmem._planner.search.step_time import LEAST_GAIN, worth_its_loss
from jaxmem._planner.search.trial import Trial, solve_and_compile
from jaxmem._planner.search.whole_steps import refine_by_whole_steps
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem.errors import StepError

# The largest share by which a full compile takes fewer bytes than a compile for buffers.
BUFFERS_DIFFER = 0.05
# The most trials near the budget that are compiled fully before the budget is refused.
MOST_PROVEN = 3
# A plan that uses at least this share of the usable bytes ends the search.
ENOUGH = 0.98
# A budget is refused if both of the first two assignments of least bytes exceed the usable bytes by
# more than this share of the usable bytes without arguments.
HOPELESS = 0.1
DIVIDED_COMPILES = 2  # compiles of the search that are left for plans with groups of layers
LOSSLESS_COMPILES = 2  # compiles of lossless plans, in addition to the other compiles


def find_plan(search: Search, arguments: int) -> None:
    """Finds the fastest plan within the limits, shows by a compile that the plan fits, and sets
    `Search.best`. A search makes at most `MOST_COMPILES` compiles of solutions. The search for a
    lossless plan, an error's least bytes and, for a TPU, `refine_by_whole_steps` may compile more.

    arguments: bytes of the step's arguments on one device, as traced.

    Raises BudgetError if no assignment needs as little host memory as `limits.host_bytes`.
    """
    compile_baseline(search, arguments)
    time_baselines(search)
    if search.baseline.total <= search.limits.usable_bytes:
        compile_unlimited(search)
    else:
        refine(search)
    if not search.fitting and not search.checkpoints_fit:
        compile_least(search)
        search.best = _proven_least(search)
        if search.best is not None:
            return
        if search.fitting:
            refine(search)  # against the model's predictions a plan fits, and corrected the model
        else:
            compile_in_spans(search)
    if search.codecs_by_default:
        look_for_lossless(search)
    search.corrections = refine_by_whole_steps(search)
    # The largest excess so far of the bytes of a full compile over the bytes of its compile for
    # buffers.
    more = 0
    while search.fitting or search.checkpoints_fit or _fitting_in_spans(search):
        # On a target that compiles for buffers, only the plan to return is compiled fully. A full
        # compile may exceed the limits. Then the trials are ranked again.
        for trial, problem in _ranked(search, more):
            proven = search.compiled_fully(trial)
            if proven is not None and search.limits.allow(proven):
                search.best, search.divided_problem = proven, problem
                return
            more = max(more, 1, 0 if proven is None else proven.total - trial.total)
        refine(search)


def look_for_lossless(search: Search) -> None:
    """Searches for a lossless plan if the fastest plan that fits is lossy. Compiles, not estimates,
    decide whether a lossless plan fits.
    """
    limits = search.limits
    best = min(search.fitting, key=search.step_time.risk_adjusted, default=None)
    if best is None or not best.cost.is_lossy:
        return
    exact = search.without_loss()
    for _ in range(LOSSLESS_COMPILES):
        fitting = [t for t in search.fitting if not t.cost.is_lossy]
        if any(t.total >= ENOUGH * limits.usable_bytes for t in fitting):
            return
        picks = search.solved(candidates.solve_within_budget, exact, 2)
        if not (fresh := _fresh(search, picks)) and not fitting:
            fresh = _fresh(search, search.solved(candidates.nearest, exact))
        if not fresh:
            return
        search.compile_solutions(fresh[:1])


def compile_least(search: Search) -> None:
    """Compiles the assignments of least bytes, before a budget is refused: of all actions, and then
    of the lossless ones. The estimates with codecs may err where the estimates without them do not,
    and a budget that lossless actions meet must not be refused if codecs are allowed too.
    """
    _compile_least(search)
    lossy = (o.lossy for b in search.profile.blocks for t in b.tags for o in t.options)
    if any(lossy) and not any(map(search.limits.allow, search.plan_trials)):
        _compile_least(search.without_loss())


def _compile_least(search: Search) -> None:
    """Compiles the assignments of least bytes of the actions that the search allows."""
    limits = search.limits
    smallest = search.solved(least, search)
    first = smallest[:2]  # two different assignments, since the liveness estimate of one may err
    search.compile_solutions(_fresh(search, first))
    trials_of = lambda picks: [t for t in search.trials if candidates.is_among(t.actions, picks)]
    if all(_exceeds_by_far(search, t.total) for t in trials_of(first)):
        return
    search.compile_solutions(_fresh(search, smallest[2:]))
    if not any(limits.allow(t) for t in search.plan_trials):
        # The errors of these liveness estimates correct the estimates of similar assignments.
        nearby = search.solved(near_least, search, trials_of(smallest))
        search.compile_solutions(_fresh(search, nearby))


def compile_unlimited(search: Search) -> None:
    """Compiles the fastest plan without a limit on device bytes, and the fastest plan of earlier
    searches, each if its time is less than the time of everything kept, which fits.
    """
    if search.profile.time_source == "roofline":
        return
    problem = ActionProblem(search.profile, None, search.limits.host_bytes)
    best = search.solved(candidates.solve_fastest, problem)
    most = search.baseline.cost.seconds - LEAST_GAIN * search.profile.step_seconds
    picks = [] if best is None or best.risk_adjusted_seconds >= most else [best]
    # `refine_by_whole_steps` compiles no plan that an earlier search compiled. Without this compile
    # it would miss the fastest plan that it found then, and the second search for a plan would
    # return a slower plan than the first.
    picks += candidates.recalled(search, problem, LEAST_GAIN)
    search.compile_solutions(_fresh(search, picks))


def refine(search: Search) -> None:
    """Solves for the usable bytes by the memory model, compiles the solutions, and fits the model
    again, until no solution is worth a compile. The trials are added to the search.
    """
    problem = ActionProblem(search.profile, None, search.limits.host_bytes)
    # No assignment of tags is faster than the best one without a limit on device bytes.
    best = search.solved(candidates.solve_fastest, problem)
    least_seconds = best.risk_adjusted_seconds if best else 0.0
    solve_and_compile(search, lambda: _next_solutions(search, least_seconds))


def _next_solutions(search: Search, least_seconds: float) -> list[ActionSolution]:
    """The solutions that `refine` compiles next, at most as many as compile at the same time.

    least_seconds: seconds of the best assignment without a limit on device bytes.
    """
    limits, width = search.limits, search.compiler.backend.parallel_compiles
    within, model = search.fitting_on_device, search.model()
    # Faster plans that an earlier search compiled within the limits are compiled before the search
    # ends. Otherwise, a search with more history could return a slower plan than one with less.
    earlier = candidates.recalled(search, search.problem(model))
    # A plan that fills the budget, or that is as fast as a plan without a limit, ends the search. A
    # plan from local search has an unknown gap, and does not end the search by filling the budget.
    done = any(
        (t.total >= ENOUGH * limits.usable_bytes and t.gap < math.inf)
        or t.cost.risk_adjusted_seconds <= least_seconds
        for t in within
    )
    # A step whose layers can be divided leaves its last compiles to `divide`.
    last = bool(within and divisible(search.profile)) and search.compiles_left <= DIVIDED_COMPILES
    if not earlier and (done or last):
        return []
    # Candidates, the most promising first. There is one more candidate than compiles at the same
    # time, since some candidates may have been compiled before.
    picks = [*earlier, *search.solved(candidates.solve_within_budget, search, width + 1)]
    fresh = _fresh(search, picks)
    if within and not fresh:
        fastest = min(t.cost.risk_adjusted_seconds for t in within)
        most = fastest - LEAST_GAIN * search.step_time.base
        fresh = _fresh(search, search.solved(candidates.solve_above_budget, search, most))
    # No trial fits, and no solution is expected to fit: try the assignments nearest to the budget.
    if not within and not fresh:
        smallest, *_ = search.solved(least, search)
        if _exceeds_by_far(search, search.expected(smallest)):
            return []  # `compile_least` shows by compiles whether the least bytes exceed the budget
        fresh = _fresh(search, search.solved(candidates.nearest, search))
    return fresh[: min(width, search.compiles_left)]


def _exceeds_by_far(search: Search, total: int) -> bool:
    """Whether `total` bytes exceed the usable bytes by more than `HOPELESS`."""
    room = search.limits.usable_bytes
    return total > room + HOPELESS * (room - search.static)


def _fresh(search: Search, picks: list[ActionSolution]) -> list[ActionSolution]:
    """The solutions that were neither compiled nor refused by XLA, without duplicates."""
    known = [t.actions for t in search.trials] + search.refused
    is_new = lambda pick: not any(candidates.alike(pick.actions, actions) for actions in known)
    return candidates.distinct(list(filter(is_new, picks)))


def _proven_least(search: Search) -> Trial | None:
    """A trial whose full compile fits although its compile for buffers does not. The trials of
    fewest bytes near the budget are tried; None if none of them fits.
    """
    limits = search.limits
    near = dataclasses.replace(limits, usable_bytes=int((1 + BUFFERS_DIFFER) * limits.usable_bytes))
    if not search.compiler.backend.stops_at_buffers or search.fitting or search.checkpoints_fit:
        return None
    as_written = [] if search.with_checkpoints is None else [search.with_checkpoints]
    likely = [t for t in (*search.trials, *as_written) if near.allow(t)]
    for trial in sorted(likely, key=lambda t: t.total)[:MOST_PROVEN]:
        try:
            proven = search.compiled_fully(trial)
        except StepError as error:  # the error of everything kept; other trials may still fit
            warn_of_refusal(trial.actions, error)
            continue
        if proven is not None and limits.allow(proven):
            return proven
    return None


def _fitting_in_spans(search: Search) -> list[Trial]:
    """The trials with layers in spans that fit, the fastest first."""
    fitting = [t for t in search.in_spans if search.limits.allow(t)]
    return sorted(fitting, key=search.step_time.risk_adjusted)


def _ranked(search: Search, more: int) -> list[tuple[Trial, ActionProblem | None]]:
    """The trials that a search may return, the best first, each with the problem of its divided
    layers, or of its layers in spans.

    more: the largest excess so far of the bytes of a full compile over the bytes of its compile for
      buffers.
    """
    limits, step_time = search.limits, search.step_time
    ranked: list[tuple[Trial, ActionProblem | None]] = []
    of_spans = lambda trial: (trial, problem_in_spans(search, trial.actions))
    if not search.fitting:
        spanned = _fitting_in_spans(search)
        if spanned:
            best = _worth_its_loss(search, spanned[0], spanned)
            ranked = [of_spans(best), *(of_spans(t) for t in spanned if t is not best)]
    else:
        fits = limits.allow(search.baseline)
        # Each trial costs a full compile, which is likely to fail if the trial is as near to the
        # limit as a trial that failed.
        likely = [t for t in search.fitting if t.total + more <= limits.usable_bytes]
        best = min(likely or search.fitting, key=lambda t: (step_time.risk_adjusted(t), t.total))
        # If everything kept fits, it is changed only for a gain of at least `LEAST_GAIN`. Times
        # that are computed from a device's rates are too rough to show such a gain.
        rough = search.profile.time_source == "roofline"
        if fits and (rough or step_time.risk_adjusted(best) > (1 - LEAST_GAIN) * step_time.base):
            best = search.baseline
        best = _worth_its_loss(search, best, likely or search.fitting)
        alone = fits or more > 0
        divided, division = (best, None) if alone else divide(search, best)
        if _worth_its_loss(search, divided, [best]) is best:
            divided, division = best, None
        problem = None if division is None else division.problem
        ranked = [(divided, problem), (best, None)][divided is best :]
        spanned = None if alone else faster_in_spans(search, divided)
        if spanned is not None and _worth_its_loss(search, spanned, [best]) is spanned:
            ranked = [of_spans(spanned), *ranked]
    if (as_written := search.checkpoints_fit) is not None:
        worth = (1 - LEAST_GAIN) * step_time.of(as_written)
        faster = [
            each
            for each in ranked
            if step_time.risk_adjusted(each[0]) <= worth
            and _worth_its_loss(search, each[0], [as_written]) is not as_written
        ]
        ranked = [*faster, (as_written, None), *(each for each in ranked if each not in faster)]
    return ranked


def _worth_its_loss(search: Search, best: Trial, others: Sequence[Trial]) -> Trial:
    """`best`, or if it is lossy and gains less than a user notices, the fastest lossless trial of
    `others`.
    """
    if not (search.codecs_by_default and best.cost.is_lossy):
        return best
    exact = sorted((t for t in others if not t.cost.is_lossy), key=lambda t: t.total)
    noticed = lambda other: search.step_time.noticed(best.cost, other.cost)
    return worth_its_loss(best, exact, search.step_time.of, noticed)
