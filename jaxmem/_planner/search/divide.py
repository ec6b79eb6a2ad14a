"""Finds the layer at which a plan divides a stack's layers into two groups, and the actions of each
group.

Only the last group's working memory is added to all saved bytes, since the backward of the first
group runs after the tensors that the last group saved are freed.

The boundary is not a variable of the mixed-integer program. The program is solved for each
boundary, decides everything else, and the best answer is taken. A stack of few layers tries every
layer as the boundary; a longer stack tries `MOST_DIVISIONS` = 16 layers, evenly spaced.

Several stacks are divided one after the other, the stack of most bytes first. The alternative is to
try the boundaries of all stacks together, which would multiply the solves.

On a GPU, a group under no checkpoint is taken only if XLA's estimates of both whole steps say so.
The profile calls such layers of a GPT faster than layers with every tag kept, and XLA calls the
step slower.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxmem._core.actions import KEEP, REST, Actions
from jaxmem._core.groups import divided, divisible
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.search.estimates import MOST_ESTIMATES
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.step_time import LEAST_GAIN, StepTime
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.memory import Expected
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution, priced
from jaxmem._planner.solve.solve import solve
from jaxmem.errors import StepError

MOST_DIVISIONS = 16  # places that are tried, evenly over the layers
Working = Mapping  # of the choices of a label's tags, as `Problem.working`


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the layers of a step are divided.

    profile: the step's, where each group is a block of its own.
    ends: by the label of each divided block the labels of its first and its last group; the last
      is None where it is under no checkpoint.
    whole: bytes of the groups under no checkpoint, by their labels.
    """

    profile: Profile
    ends: Mapping[str, tuple[str, str | None]] = dataclasses.field(default_factory=dict)
    whole: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def with_block(self, block: BlockClass, at: int, size: int | None = None) -> "Groups":
        """The same with one more block divided, before its layer `at`; `size` is what the last
        group takes under no checkpoint, None if it is under one.
        """
        split = divided(self.profile, block, at)
        first, last = (b.name for b in split.blocks if b.name.startswith(f"{block.name}["))
        ends = {**self.ends, block.name: (first, last if size is None else None)}
        return Groups(split, ends, self.whole if size is None else {**self.whole, last: size})


@dataclasses.dataclass(frozen=True)
class Division:
    """Layers in groups, and what each does.

    groups: which they are.
    problem: what was solved: its profile has each group as a block.
    solution: the assignment for it.
    bytes: what it adds to the memory model's reference, at the largest of the groups' peaks.
    """

    groups: Groups
    problem: Problem
    solution: Solution
    bytes: int


def best_division(problem: Problem, stored: float | None = None) -> Division | None:
    """Returns the fastest two groups of layers, of each stack that gains by them, within the
    problem's room.

    The result is None if no place gives a plan that fits, if there is no stack to divide, or if the
    problem has no `room`.

    stored: the share of the bytes counted for layers under no checkpoint that they take. If it is
      known, a last group may also be kept so, which is faster and larger than every tag kept.
    """
    if problem.room is None:
        return None
    best, groups = None, Groups(problem.profile)
    for block in divisible(problem.profile):
        found = [best, *_divisions(problem, groups, block, stored)]
        ready = [division for division in found if division is not None]
        best = min(ready, key=lambda d: (d.solution.cautious_seconds, d.bytes), default=None)
        groups = groups if best is None else best.groups
    return best


def _divisions(
    problem: Problem, groups: Groups, block: BlockClass, stored: float | None
) -> Iterator[Division | None]:
    """The fastest plan for each place where `block` may be divided, beside `groups`."""
    layers = block.divisible
    for k in range(1, MOST_DIVISIONS + 1):
        # `at` is the first layer of the last group. Stacks of few layers try every place.
        at = k * layers // (MOST_DIVISIONS + 1) if layers > MOST_DIVISIONS else k
        if not 0 < at < layers:
            continue
        yield _solved(problem, groups.with_block(block, at), block.name)
        if stored is not None:
            size = stored * block.everything_bytes * block.layers * (layers - at) / layers
            yield _solved(problem, groups.with_block(block, at, round(size)), block.name)


def _solved(problem: Problem, groups: Groups, newest: str) -> Division | None:
    """Returns the fastest plan for the groups, or None.

    A last group's backward runs while everything is saved; that of a first one, when what the last
    saved is gone. So only the last group's working memory is on top of all that is saved, and the
    first group's on top of its own.

    newest: the label of the block that was divided last.
    """
    open_blocks = tuple(b for b in groups.profile.blocks if b.name not in groups.whole)
    profile = dataclasses.replace(groups.profile, blocks=open_blocks)
    taken = sum(groups.whole.values())
    room = (problem.room or 0) - taken
    # First count the last group's working memory only. If that plan's peak lies in the first
    # group, count both, which is an overestimate.
    first, last = groups.ends[newest]
    for counted in ([last or first], [first, last]) if last else ([first],):
        of = {name: [b or a] for name, (a, b) in groups.ends.items()} | {newest: counted}
        working = _counted_for(problem.working, of)
        # What was refused names undivided blocks, of which this problem has none.
        asked = dataclasses.replace(
            problem, profile=profile, working=working, room=room, excluded=()
        )
        solution = solve(asked) if room >= 0 else None
        if solution is None:
            return None
        peak = _peak(problem.working, groups, profile, solution)
        if peak <= room:
            whole = dataclasses.replace(asked, profile=groups.profile, room=problem.room)
            kept = {label: {REST: KEEP} for label in groups.whole}
            found = priced(whole, solution.actions | kept, solution.solve_seconds, solution.gap)
            return Division(groups, whole, found, peak + taken)
    return None


def _counted_for(working: Working, of: Mapping[str, list]) -> dict:
    """Working memory by choice. The working memory of a divided block is counted for each of the
    groups that `of` names.
    """
    return {
        (label, tag, choice): size
        for (block, tag, choice), size in working.items()
        for label in of.get(block, [block])
    }


def _peak(working: Working, groups: Groups, profile: Profile, solution: Solution) -> int:
    """Returns the largest of the groups' peaks: that of last groups with all that is saved, and
    that of each first one without what its last one saved.

    working: of the undivided blocks' choices.
    profile: of the groups that `solution` decides.
    """
    saved = {
        cost.name: cost.device_bytes * block.layers
        for cost, block in zip(solution.cost.blocks, profile.blocks)
    }
    ends = {name: [last or first] for name, (first, last) in groups.ends.items()}

    def peak(of: Mapping[str, list], gone: int) -> int:
        """The bytes while groups `of` run, when so much of what was saved is gone."""
        counted = _counted_for(working, of)
        chosen = ((b, t, c) for b, tags in solution.actions.items() for t, c in tags.items())
        return solution.saved_bytes - gone + round(sum(counted.get(key, 0.0) for key in chosen))

    at_ends = peak(ends, 0)
    of_first = [
        peak(ends | {name: [first]}, saved[last])
        for name, (first, last) in groups.ends.items()
        if last
    ]
    return max(at_ends, *of_first) if of_first else at_ends


def divide(search: Search, best: Trial, step_time: StepTime) -> tuple[Trial, Division | None]:
    """Returns the best plan that decides two groups of layers apart, with its division, if it
    is faster than `best` by `LEAST_GAIN` and compiles within the limits; else `best` and None.

    A profile prices the pieces of a layer under a checkpoint. Of layers under none it knows the
    bytes alone, and may be wrong: where the clock calls such a plan slower, one without such
    layers is looked for.
    """
    divided, division, slower = _divide(search, best, step_time, whole=True)
    if division is None and slower:
        divided, division, _ = _divide(search, best, step_time, whole=False)
    return divided, division


def _divide(
    search: Search, best: Trial, step_time: StepTime, whole: bool
) -> tuple[Trial, Division | None, bool]:
    """The best plan of two groups of layers; `whole` allows that the last group is under no
    checkpoint. The third of what is returned says whether one with such layers fits, and the
    clock called it slower.
    """
    limits = search.limits
    # The most seconds that a division may cost, to be worth its compile.
    worth = best.cost.cautious_seconds - LEAST_GAIN * search.profile.step_seconds
    chosen, short, seen, slower = None, 0, [], False
    while search.compiles_left > 0:
        model = search.model()
        # The memory model is of layers alike and is not fitted to divided plans. What their
        # predictions were short by, `short`, of estimates or compiles, is added to its reference.
        base = search.static + int(model.reference) + short
        problem = search.problem(model)
        stored = _share_stored(search, model) if whole else None
        division = search.solved(best_division, problem.within(limits.usable_bytes - base), stored)
        if division is None or division.solution.actions in seen:
            break
        if division.solution.cautious_seconds > worth:
            break
        seen.append(division.solution.actions)
        predicted = base + division.bytes
        estimated = _estimated(search, division.solution.actions, best)
        if estimated is not None and estimated > limits.usable_bytes:
            if len(seen) >= MOST_ESTIMATES:
                break
            short += estimated - predicted  # no compile is spent on what is not expected to fit
            continue
        (step,) = search.try_compile(division.solution.actions, least=best.total)
        if isinstance(step, StepError):
            break
        told = predicted if estimated is None else estimated
        solution, told = division.solution, max(search.static, told)
        tried = Trial(step, solution.cost, told, solution.gap)
        short += tried.total - predicted
        if not limits.allow(tried):
            continue
        if step_time.cautious(tried) >= step_time.cautious(best):
            slower = bool(division.groups.whole)
            break
        best, chosen = tried, division
        worth = best.cost.cautious_seconds - LEAST_GAIN * search.profile.step_seconds
    return best, chosen, slower


def _estimated(search: Search, actions: Actions, best: Trial) -> int | None:
    """Bytes of the step under actions of divided layers: those that `best` compiled to, and the
    difference of liveness estimates; None once estimates took too long.
    """
    estimates = search.estimates
    own, of_best = estimates.estimate(actions), estimates.estimate(best.actions)
    return None if own is None or of_best is None else best.total + own - of_best


def _share_stored(search: Search, model: Expected) -> float | None:
    """Returns the share that XLA stores of the bytes that a trace counts for layers under no
    checkpoint: it stores fewer than every tensor that the backward reads. It is that of all blocks
    in the step with everything kept; None where that does not tell.
    """
    counted = sum(b.layers * b.everything_bytes for b in search.profile.blocks)
    stored = search.baseline.total - search.static - model.reference
    return min(1.0, stored / counted) if counted and stored > 0 else None
