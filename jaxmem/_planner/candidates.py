"""What a search may compile next: pure functions of the trials, the model and the problem."""

import math
from collections.abc import Sequence

from jaxmem._core.actions import KEEP, RECOMPUTE, Action, Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.trials import Trial, Trials
from jaxmem._solver.cost import Cost, evaluate
from jaxmem._solver.memory import Expected
from jaxmem._solver.problem import Problem
from jaxmem._solver.solution import Solution, fits, priced
from jaxmem._solver.solve import least_bytes, solve
from jaxmem.errors import TagError

SHARES = (1.0, 0.985, 0.96)  # of the room: a prediction may be short by so much


def fastest(problem: Problem) -> Solution | None:
    """The solver's answer, with its actions `settled`."""
    solution = solve(problem)
    if solution is None:
        return None
    return priced(problem, settled(problem.profile, solution), solution.solve_seconds, solution.gap)


def within_budget(trials: Trials, model: Expected, count: int) -> list[Solution]:
    """The fastest assignments for the room that is left, and for a little less: `count` of them."""
    found = [fastest(trials.problem(model, share)) for share in SHARES[:count]]
    return [solution for solution in found if solution is not None]


def towards_the_least(trials: Trials, model: Expected) -> tuple[Solution | None, list[Solution]]:
    """Where nothing fits yet: the assignment of least bytes, and others that may turn out
    smaller.
    """
    problem = trials.problem(model)
    nothing = priced(problem, {b.name: {} for b in trials.profile.blocks})
    return least_bytes(problem), [nothing, *neighbours(trials, problem)]


def neighbours(trials: Trials, problem: Problem) -> list[Solution]:
    """The plans one choice away from the least that compiled, least first: the model may be wrong
    about one.
    """
    least = min(trials.compiled, key=lambda t: t.total).actions
    found = [
        priced(problem, least | {block: least[block] | {tag: choice}})
        for (block, tag), choices in problem.open_choices().items()
        for choice in choices
    ]
    on_host = problem.within(None)
    return sorted((s for s in found if fits(s, on_host)), key=lambda s: (s.bytes, s.seconds))


def recalled(trials: Trials, problem: Problem) -> Solution | None:
    """The fastest plan that an earlier search saw compile within this budget, if this search has
    none so fast yet.
    """
    best = min((t.cost.seconds for t in trials.within_budget), default=math.inf)
    limits = trials.limits
    faster = [
        t
        for t in trials.recalled
        if t.total <= limits.room and t.host_bytes <= limits.host_room and t.cost.seconds < best
        if not is_among(t.actions, trials.compiled)
    ]
    if not faster:
        return None
    return priced(problem, min(faster, key=lambda t: t.cost.seconds).actions)


def settled(profile: Profile, solution: Solution) -> Actions:
    """The same program, with a tag called kept where its tensor is the block's input, which is kept
    anyway.
    """
    actions = solution.actions
    price = (solution.saved_bytes, solution.seconds)
    for label, choices in solution.actions.items():
        for tag, choice in choices.items():
            if choice != RECOMPUTE:
                continue
            other = actions | {label: actions[label] | {tag: KEEP}}
            cost = price_of(profile, other)
            if cost is not None and (cost.saved_bytes, cost.seconds) == price:
                actions = other if _is_saved(cost, label, tag) else actions
    return actions


def price_of(profile: Profile, actions: Actions) -> Cost | None:
    """The price of an assignment, None where it takes a choice that has none."""
    try:
        return evaluate(profile, actions)
    except TagError:  # such as keep, where it is not among the actions allowed
        return None


def is_among(actions: Actions, others: Sequence[Trial | Solution]) -> bool:
    """Whether the assignment is one of these; a tag that is absent is recomputed."""
    return any(_stored(actions) == _stored(other.actions) for other in others)


def _stored(actions: Actions) -> dict:
    return {
        label: {t: c for t, c in tags.items() if c.action is not Action.RECOMPUTE}
        for label, tags in actions.items()
    }


def _is_saved(cost: Cost, label: str, tag: str) -> bool:
    return any(b.name == label and tag in dict(b.saved) for b in cost.blocks)
