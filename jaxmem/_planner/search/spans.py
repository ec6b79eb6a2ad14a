"""Finds the number of layers of a span, and the actions of layers in spans.

In spans of k layers, only every k-th layer's input is saved through the step. The backward of a
span runs its k layers forward again, and saves their inputs and what their actions save. So of L
layers, L / k inputs and the tensors of k layers are alive together, and each layer takes the
seconds of one more forward. The choices of the tags then count k times, not L times: richer actions
fit again.

The number k is not a variable of the mixed-integer program, in which it would multiply every
choice. The program is solved for each of a few numbers, as `divide` solves it for each boundary.
The bytes L / k + (1 + s) k, in inputs, are least at k = sqrt(L / (1 + s)), where s is what a layer
saves. So numbers above 2 sqrt(L) are left out for more than `FEW` layers.

The alternative was a search of its own for each number, with a memory model of its own. Each would
take several compiles. The working memory of a block under an action does not depend on the spans,
so the model of the undivided layers serves, and a liveness estimate of the step in spans corrects
it.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxmem._core.actions import Actions
from jaxmem._core.groups import as_decided, in_spans, ranges, span_of, spannable, ungrouped
from jaxmem._core.profile import Profile
from jaxmem._planner.search.estimates import MOST_ESTIMATES
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import LEAST_GAIN
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.problem import ActionProblem, in_groups
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import least_bytes, solve

FEW = 16  # the most layers for which all numbers of layers of a span are tried
GRID = 12  # numbers that are tried in addition to the divisors of the number of layers
SPAN_COMPILES = 3  # compiles of layers in spans, if no other plan fits

# A problem whose profile has layers in spans, and its solution.
Solved = tuple[ActionProblem, ActionSolution]


def numbers_of(layers: int) -> list[int]:
    """The numbers of layers of a span that are tried for a stack of `layers` layers: all numbers
    for few layers; for many layers, numbers up to 2 sqrt(layers): the divisors of `layers`, and
    `GRID` numbers in about equal ratios.
    """
    if layers <= FEW:
        return [*range(2, layers)]
    most = math.isqrt(4 * layers)
    divisors = (k for k in range(2, most + 1) if layers % k == 0)
    grid = (round(2 * (most / 2) ** (i / (GRID - 1))) for i in range(GRID))
    return sorted({*divisors, *grid})


class Excess:
    """The bytes by which the memory model of undivided layers underestimates layers in spans, by
    the number of layers of a span. The loop over a span's layers holds the gradients of the span's
    parameters if JAX derives its backward, so that the excess grows with the number. If layers are
    left after the last whole span, JAX joins the gradients of two loops, and holds them twice. So
    numbers that leave layers have an excess of their own.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], dict[int, int]] = {}

    def learn(self, label: str, excess: int) -> None:
        """Learns the excess of a plan whose layers in spans have this label."""
        self._known.setdefault(_kind(label), {})[span_of(label)] = excess

    def of(self, profile: Profile) -> int:
        """The excess of the layers in spans of a profile, interpolated between known numbers."""
        return sum(self._of(block.name) for block in profile.blocks)

    def _of(self, label: str) -> int:
        known = sorted(self._known.get(_kind(label), {}).items()) if span_of(label) > 1 else []
        if not known:
            return 0
        numbers, sizes = [k for k, _ in known], [size for _, size in known]
        return round(float(np.interp(span_of(label), numbers, sizes)))


def _kind(label: str) -> tuple[str, bool]:
    """The block of a label of layers in spans, and whether the spans leave layers."""
    block = ungrouped(label)
    ((start, stop, span),) = ranges([label], block)
    return block, (stop - start) % span > 0


def best_in_spans(
    problem: ActionProblem,
    solver: Callable[[ActionProblem], ActionSolution | None] = solve,
    most_seconds: float | None = None,
    excess: Excess | None = None,
) -> Solved | None:
    """Returns the best solution with layers in spans within the problem's room; None if none fits.

    problem: the problem of the undivided layers.
    solver: `solve` for the least time, or `least_bytes`.
    most_seconds: risk-adjusted seconds above which a solution is of no use.
    excess: bytes that layers in spans take in addition to the bytes by the problem.
    """
    excess = excess or Excess()
    by_bytes = lambda of, one: (one.bytes + excess.of(of.profile), one.risk_adjusted_seconds)
    by_seconds = lambda of, one: (one.risk_adjusted_seconds, one.bytes + excess.of(of.profile))
    rank = by_bytes if solver is least_bytes else by_seconds
    best: Solved | None = None
    for loop in spannable(problem.profile):
        # The loops before this one are as in the best solution so far.
        profile = problem.profile if best is None else best[0].profile
        for span in numbers_of(loop[0].divisible):
            spanned = of_profile(problem, in_spans(profile, loop, span))
            if problem.room is not None:
                spanned = spanned.within(problem.room - excess.of(spanned.profile))
            if solver is solve:
                most = most_seconds if best is None else best[1].risk_adjusted_seconds
                spanned = dataclasses.replace(spanned, most_seconds=most)
            solution = solver(spanned)
            if solution is not None and (best is None or rank(spanned, solution) < rank(*best)):
                best = dataclasses.replace(spanned, most_seconds=None), solution
    return best


def of_profile(problem: ActionProblem, profile: Profile) -> ActionProblem:
    """The problem with a profile whose layers are divided, or in spans. The working memory of a
    block's choices is the working memory of the undivided layers. Excluded assignments name
    undivided layers, and are left out.
    """
    groups_of: dict[str, list[str]] = collections.defaultdict(list)
    for block in profile.blocks:
        groups_of[ungrouped(block.name)].append(block.name)
    working = in_groups(problem.working, groups_of)
    refused = frozenset(in_groups(dict.fromkeys(problem.refused, 0.0), groups_of))
    return dataclasses.replace(
        problem, profile=profile, working=working, refused=refused, excluded=()
    )


def problem_in_spans(search: Search, actions: Actions) -> ActionProblem:
    """The problem of a search, with its layers divided as an assignment divides them."""
    problem = search.problem(search.model())
    blocks = as_decided(search.profile.blocks, actions)
    return of_profile(problem, dataclasses.replace(search.profile, blocks=blocks))


def compile_in_spans(search: Search) -> None:
    """Compiles plans with layers in spans, if no other plan fits: the fastest ones that should fit,
    and if none of them fits, the plan of least bytes. The trials are added to `Search.in_spans`.
    """
    if not spannable(search.profile):
        return
    fits = lambda exact: any(
        search.limits.allow(t) and not (exact and t.cost.is_lossy) for t in search.in_spans
    )
    for one in (search, search.without_loss()) if search.codecs_by_default else (search,):
        for _ in _compiled(one, search.smallest_trial, None, SPAN_COMPILES):
            if fits(one.lossless):
                break
    if fits(False):
        return
    found = _least(search)
    if found is not None and not any(found[1].actions == t.actions for t in search.in_spans):
        _compile(search, found[1], search.smallest_trial)


def faster_in_spans(search: Search, best: Trial) -> Trial | None:
    """Returns the fastest plan with layers in spans that compiles within the limits, if it is
    faster than `best` by `LEAST_GAIN`; else None.
    """
    worth, step_time = LEAST_GAIN * search.profile.step_seconds, search.step_time
    most = best.cost.risk_adjusted_seconds - worth
    for trial in _compiled(search, best, most, search.compiles_left):
        if search.limits.allow(trial):
            is_faster = step_time.risk_adjusted(trial) < step_time.risk_adjusted(best) - worth
            return trial if is_faster else None
    return None


def _compiled(search: Search, known: Trial, most: float | None, compiles: int) -> Iterator[Trial]:
    """Yields the fastest plans in spans that should fit, compiled. Each compile that takes more
    bytes than predicted reduces the room of the next plan.

    known: a compiled plan, whose bytes correct the liveness estimates.
    most: risk-adjusted seconds above which a plan is of no use; None for no limit.
    compiles: the most compiles.
    """
    excess, seen, done = Excess(), [], 0
    while done < compiles and len(seen) < MOST_ESTIMATES:
        problem = search.problem(search.model())
        found = search.solved(best_in_spans, problem, solve, most, excess)
        if found is None and not seen:  # the excess may be negative
            found = search.solved(best_in_spans, problem.within(None), least_bytes)
        if found is None or any(found[1].actions == actions for actions in seen):
            return
        seen.append(found[1].actions)
        expected = search.estimated(found[1].actions, known)
        if expected is not None:
            _learn(search, excess, found, expected)
            if expected > search.limits.usable_bytes:
                continue  # a plan that is not expected to fit is not compiled
        done += 1
        trial = _compile(search, found[1], known)
        if trial is None:
            return
        yield trial
        _learn(search, excess, found, trial.total)


def _learn(search: Search, excess: Excess, found: Solved, size: int) -> None:
    """Learns the bytes of a solution, as estimated or compiled."""
    labels = [block.name for block in found[0].profile.blocks if span_of(block.name) > 1]
    excess.learn(labels[-1], size - _by_model(search, found[1]))


def _by_model(search: Search, solution: ActionSolution) -> int:
    """Bytes of the step under a solution in spans, by the memory model of undivided layers."""
    return search.static + int(search.model().reference) + solution.bytes


def _compile(search: Search, solution: ActionSolution, known: Trial) -> Trial | None:
    """Compiles a solution in spans, and adds its trial to the search; None if XLA fails."""
    by_model = _by_model(search, solution)
    trial = search.compile_divided(solution, by_model, known, search.least_bytes)
    if trial is not None:
        search.in_spans.append(trial)
    return trial


def _least(search: Search) -> Solved | None:
    """The solution in spans of least bytes by the memory model, which liveness estimates correct
    until they name the same solution again.
    """
    problem, excess = search.problem(search.model()).within(None), Excess()
    seen: list[tuple[int, Solved]] = []
    for _ in range(MOST_ESTIMATES):
        found = search.solved(best_in_spans, problem, least_bytes, None, excess)
        if found is None or any(found[1].actions == one[1].actions for _, one in seen):
            break
        size = search.estimates.estimate(found[1].actions, "least")
        if size is None:
            return found
        seen.append((size, found))
        _learn(search, excess, found, search.static + size)
    return min(seen, key=lambda pair: pair[0], default=(0, None))[1]
