"""Finds the layer at which a plan divides a stack's layers into two groups, and the actions of each
group.

Only the last group's working memory is added to all saved bytes, since the backward of the first
group runs after the tensors that the last group saved are freed.

The boundary is not a variable of the mixed-integer program. The program is solved for each
boundary, and decides everything else. The best solution is taken. A program has no solution that is
slower than the best plan so far, which the solver mostly finds out without a search. In a stack of
few layers, every layer is tried as the boundary; in a longer stack, `MOST_DIVISIONS` = 16 layers,
evenly spaced.

Several stacks are divided one after the other, the stack of most bytes first. The alternative is to
try the boundaries of all stacks together, which would multiply the solves.

On a GPU, a group under no checkpoint is taken only if the step is faster by XLA's estimates of both
whole steps. By the profile, such layers of a GPT are faster than layers with every tag kept. By
XLA's estimate, the step is slower.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxmem._core.actions import KEEP, UNTAGGED
from jaxmem._core.groups import divided, divisible, group_label, ungrouped
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.search.estimates import MOST_ESTIMATES
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import LEAST_GAIN
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.problem import ActionProblem, in_groups, keys_of
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import solve

MOST_DIVISIONS = 16  # boundaries that are tried, evenly spaced over the layers
Working = Mapping  # working memory by (block, tag, choice), as `ActionProblem.working`
# By the label of each divided block, the labels of its groups under a checkpoint, in order.
Groups = Mapping[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Division:
    """Groups of layers, with the actions of each group.

    problem: the solved problem, whose profile has each group as a block.
    whole: bytes of the groups under no checkpoint, by their labels.
    solution: the assignment. Its `bytes` are counted at the largest of the groups' peaks.
    """

    problem: ActionProblem
    whole: Mapping[str, int]
    solution: ActionSolution


def best_division(
    problem: ActionProblem, stored: float | None = None, most_seconds: float | None = None
) -> Division | None:
    """Returns the fastest division into two groups of layers, within the problem's room, of each
    stack for which a division is faster.

    The result is None if no boundary gives a plan that fits, if there is no stack to divide, or if
    the problem has no `room`.

    stored: for layers under no checkpoint, the stored bytes as a share of the counted bytes. If it
      is known, a last group may be under no checkpoint too, which is faster and takes more bytes
      than every tag kept.
    most_seconds: risk-adjusted seconds above which a division is of no use, such as the seconds of
      the best plan without groups.
    """
    if problem.room is None:
        return None
    best, profile, whole = None, problem.profile, {}
    for block in divisible(problem.profile):
        for wider, wider_whole in _boundaries(profile, whole, block, stored):
            if best is not None:
                most_seconds = best.solution.risk_adjusted_seconds
            limited = dataclasses.replace(problem, profile=wider, most_seconds=most_seconds)
            solved = [d for d in (best, _solved(limited, wider_whole, block)) if d is not None]
            rank = lambda d: (d.solution.risk_adjusted_seconds, d.solution.bytes)
            best = min(solved, key=rank, default=None)
        if best is not None:
            profile, whole = best.problem.profile, best.whole
    return best


def _boundaries(
    profile: Profile, whole: Mapping[str, int], block: BlockClass, stored: float | None
) -> Iterator[tuple[Profile, Mapping[str, int]]]:
    """Yields for each boundary in `block` the profile with the two groups of the block, and `whole`
    as in `Division`, with the block's last group if it is under no checkpoint.
    """
    layers = block.divisible
    for k in range(1, MOST_DIVISIONS + 1):
        # `at` is the first layer of the last group. In stacks of few layers, every layer is tried.
        at = k * layers // (MOST_DIVISIONS + 1) if layers > MOST_DIVISIONS else k
        if not 0 < at < layers:
            continue
        split = divided(profile, block, at)
        yield split, whole
        if stored is not None:
            size = stored * block.everything_bytes * block.layers * (layers - at) / layers
            yield split, {**whole, group_label(block.name, at, layers): round(size)}


def _solved(
    problem: ActionProblem, whole: Mapping[str, int], newest: BlockClass
) -> Division | None:
    """Returns the fastest plan for the groups of the problem's profile; None if no plan fits.

    The backward of a last group runs while all saved tensors are alive. The backward of a first
    group runs after the last group's saved tensors are freed. So the last group's working memory is
    added to all saved bytes, and the first group's working memory to the first group's saved bytes.

    whole: as in `Division`.
    newest: the block that was divided last.
    """
    open_blocks = tuple(b for b in problem.profile.blocks if b.name not in whole)
    profile = dataclasses.replace(problem.profile, blocks=open_blocks)
    names = [block.name for block in open_blocks]
    stacks = dict.fromkeys(ungrouped(name) for name in names if ungrouped(name) != name)
    groups = {stack: [name for name in names if ungrouped(name) == stack] for stack in stacks}
    lasts = {name: labels[-1:] for name, labels in groups.items()}
    kept_bytes = sum(whole.values())
    room = (problem.room or 0) - kept_bytes
    # First count the last group's working memory only. If the first group has the peak of the
    # resulting plan, count the working memory of both groups, which is an overestimate.
    both = groups[newest.name]
    for counted in (both[-1:], both)[: len(both)]:
        working = in_groups(problem.working, lasts | {newest.name: counted})
        # Excluded assignments name undivided blocks, which this problem does not have.
        open_problem = dataclasses.replace(
            problem, profile=profile, working=working, room=room, excluded=()
        )
        solution = solve(open_problem) if room >= 0 else None
        if solution is None:
            return None
        peak = _peak(problem.working, groups, profile, solution)
        if peak <= room:
            full = dataclasses.replace(
                open_problem, profile=problem.profile, room=problem.room, most_seconds=None
            )
            actions = solution.actions | {label: {UNTAGGED: KEEP} for label in whole}
            complete = ActionSolution.of(full, actions, solution.solve_seconds, solution.gap)
            working_bytes = peak + kept_bytes - complete.saved_bytes
            return Division(full, whole, dataclasses.replace(complete, working_bytes=working_bytes))
    return None


def _peak(working: Working, groups: Groups, profile: Profile, solution: ActionSolution) -> int:
    """Returns the peak of a divided plan. It is the largest of these peaks: the last groups'
    working memory plus all saved bytes; and for each first group, its working memory plus all saved
    bytes except the bytes that the last group of its block saved.

    working: working memory of the undivided blocks' choices.
    profile: the profile of the groups that `solution` decides.
    """
    saved = {
        cost.name: cost.device_bytes * block.layers
        for cost, block in zip(solution.cost.blocks, profile.blocks)
    }
    lasts = {name: labels[-1:] for name, labels in groups.items()}

    def peak(groups_of: Groups, freed: int) -> int:
        """The bytes while the groups of `groups_of` run, after `freed` of the saved bytes are
        freed.
        """
        counted = in_groups(working, groups_of)
        chosen = sum(counted.get(key, 0.0) for key in keys_of(solution.actions))
        return solution.saved_bytes - freed + round(chosen)

    of_first = [
        peak(lasts | {name: [first]}, saved[last])
        for name, (first, *others) in groups.items()
        for last in others
    ]
    return max([peak(lasts, 0), *of_first])


def divide(search: Search, best: Trial) -> tuple[Trial, Division | None]:
    """Returns the best plan with separate actions for two groups of layers, with its division, if
    the plan is faster than `best` by `LEAST_GAIN` and compiles within the limits; else `best` and
    None.

    A profile prices the pieces of a layer under a checkpoint. For layers under no checkpoint, the
    profile has only bytes, and its seconds may be wrong. If the times of whole steps show that a
    plan with such layers is slower than `best`, a plan without such layers is searched.
    """
    divided, division, slower = _divide(search, best, whole=True)
    if division is None and slower:
        divided, division, _ = _divide(search, best, whole=False)
    return divided, division


def _divide(search: Search, best: Trial, whole: bool) -> tuple[Trial, Division | None, bool]:
    """The best plan with two groups of layers, and its division. The third result is True if a plan
    whose last group is under no checkpoint fits, and is slower than `best` by the times of whole
    steps.

    whole: whether the last group may be under no checkpoint.
    """
    limits, step_time = search.limits, search.step_time
    # The most seconds of a divided plan that is worth a compile.
    worth = best.cost.risk_adjusted_seconds - LEAST_GAIN * search.profile.step_seconds
    chosen, short, seen, slower = None, 0, [], False
    while search.compiles_left > 0:
        model = search.model()
        # The memory model is fitted to undivided plans only. `short` is the bytes by which it has
        # underestimated divided plans so far, by liveness estimates or compiles.
        base = search.static + int(model.reference) + short
        problem = search.problem(model)
        stored = _share_stored(search, model) if whole else None
        within = problem.within(limits.usable_bytes - base)
        division = search.solved(best_division, within, stored, best.cost.risk_adjusted_seconds)
        if division is None or division.solution.actions in seen:
            break
        if division.solution.risk_adjusted_seconds > worth:
            break
        seen.append(division.solution.actions)
        predicted = base + division.solution.bytes
        estimated = search.estimated(division.solution.actions, best)
        if estimated is not None and estimated > limits.usable_bytes:
            if len(seen) >= MOST_ESTIMATES:
                break
            short += estimated - predicted  # a plan that is not expected to fit is not compiled
            continue
        trial = search.compile_divided(division.solution, predicted, best, best.total)
        if trial is None:
            break
        short += trial.total - predicted
        if not limits.allow(trial):
            continue
        if step_time.risk_adjusted(trial) >= step_time.risk_adjusted(best):
            slower = bool(division.whole)
            break
        best, chosen = trial, division
        worth = best.cost.risk_adjusted_seconds - LEAST_GAIN * search.profile.step_seconds
    return best, chosen, slower


def _share_stored(search: Search, model: Additive) -> float | None:
    """Returns, for layers under no checkpoint, the bytes that XLA stores as a share of the bytes
    that a trace counts: XLA does not store every tensor that the backward reads. The share is
    computed over all blocks of the step with everything kept. None if it cannot be computed.
    """
    counted = sum(b.layers * b.everything_bytes for b in search.profile.blocks)
    stored = search.baseline.total - search.static - model.reference
    return min(1.0, stored / counted) if counted and stored > 0 else None
