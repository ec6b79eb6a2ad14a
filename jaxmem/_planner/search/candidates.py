"""The assignments that a search may compile next: pure functions of the search, the model and the
problem.

Each function returns candidates with their predicted price. `search.py` decides how many of them
are compiled, and leaves out those that were compiled before.
"""

import math
from collections.abc import Sequence

from jaxmem._core.actions import KEEP, Actions, stored
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.local_search import local_search
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.cost import Cost, evaluate, tag_at
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem.errors import TagError

# Shares of the usable bytes for which candidates are solved. If a prediction is too low, the plan
# for a smaller share may still fit.
SHARES = (1.0, 0.985, 0.96)
# Shares of the usable bytes for which a candidate is solved if the search would end, and no plan
# uses `FILLED` of them. If predictions are too high, as they often are near the least bytes, the
# candidate fits.
LARGER_SHARES = (1.03, 1.1)
FILLED = 0.95
# A candidate may be predicted to take up to this multiple of the usable bytes: predictions are no
# more exact, and the solver counts bytes in units.
PREDICTED_SHARE = 1.002


def solve_fastest(problem: ActionProblem) -> ActionSolution | None:
    """Returns the solver's solution with its actions `settled`; None if no assignment fits."""
    solution = solve(problem)
    if solution is None:
        return None
    actions = settled(problem.profile, solution)
    return ActionSolution.of(problem, actions, solution.solve_seconds, solution.gap)


def solve_within_budget(search: Search, count: int) -> list[ActionSolution]:
    """Returns the fastest assignment for each of the first `count` of `SHARES` of the usable bytes.
    Each share but the first is reduced by the largest underprediction of this search. Assignments
    that estimates do not expect to fit are left out.
    """
    short = _short(search)
    shares = [SHARES[0], *(share - short for share in SHARES[1:])][:count]
    solutions = [search.agreed(solve_fastest, share) for share in shares]
    most = PREDICTED_SHARE * search.limits.usable_bytes
    return [s for s in solutions if s is not None and search.expected(s) <= most]


def solve_above_budget(search: Search, seconds: float) -> list[ActionSolution]:
    """Returns the fastest assignment for the first of `LARGER_SHARES` that has one of less than
    `seconds`. Empty if a plan uses `FILLED` of the usable bytes, or if such an assignment of this
    search did not fit: predictions are not too high.
    """
    usable = search.limits.usable_bytes
    filled = any(t.total >= FILLED * usable for t in search.fitting_on_device)
    if filled or any(min(t.predicted_bytes, t.total) > usable for t in search.plan_trials[1:]):
        return []
    solutions = (search.agreed(solve_fastest, share) for share in LARGER_SHARES)
    return next(([s] for s in solutions if s and s.risk_adjusted_seconds < seconds), [])


def _short(search: Search) -> float:
    """The largest share of the usable bytes by which a prediction was too low, less the share that
    the second of `SHARES` allows for. The first trial is left out: before it, the model was fitted
    to no plan of this search.
    """
    error = max((t.total - t.predicted_bytes for t in search.plan_trials[1:]), default=0)
    return max(0.0, error / search.limits.usable_bytes - (1 - SHARES[1]))


def nearest(search: Search) -> list[ActionSolution]:
    """Returns, for a search in which no trial fits yet, at least one assignment that may fit: first
    the assignments that local search finds by estimates, then the assignment of fewest bytes by the
    memory model, and full recomputation. The latter two differ from the first, for which estimates
    may be wrong.
    """
    by_model = search.agreed(least_bytes)
    problem = search.problem(search.model())
    nothing = ActionSolution.of(problem, search.profile.everything_recomputed)
    alternatives = [s for s in (by_model, nothing) if s is not None]
    usable = [t for t in search.trials if not (search.lossless and t.cost.is_lossy)]
    smallest = min(usable, key=lambda t: t.total).actions
    starts = [smallest, *(s.actions for s in alternatives)]
    first = _descended(search, starts)
    if first is None:
        return alternatives
    # A candidate that should fit may still not fit, so also solve for a smaller share. If no
    # candidate should fit, a smaller share gives the same candidate.
    fits = search.expected(first) <= search.limits.usable_bytes
    second = _descended(search, starts, SHARES[1]) if fits else None
    return [first, *([] if second is None else [second]), *alternatives]


def _descended(
    search: Search, starts: Sequence[Actions], share: float = 1.0
) -> ActionSolution | None:
    """The fastest plan that estimates expect to fit a `share` of the usable bytes, found by small
    changes of `starts`. If no plan is expected to fit, the plan that exceeds the share by the
    fewest bytes; None once the limit of estimates is reached.
    """
    known = [(t.actions, t.working) for t in (*search.trials, *search.recalled)]
    room = search.limits.usable_bytes * share - search.static
    expected = search.estimates.expecting(known)
    return local_search(starts, search.problem(search.model()), expected, room)


def recalled(search: Search, problem: ActionProblem, gain: float = 0.0) -> list[ActionSolution]:
    """Returns the fastest plan that an earlier search compiled to bytes within this budget, if no
    trial of this search is as fast yet. If a lossy codec must gain more than other actions, the
    fastest lossless plan is also returned, if no lossless trial of this search is as fast yet.

    gain: the share of the seconds of this search's fastest trial that the plan must gain.
    """
    limits, here, seconds = search.limits, search.fitting_on_device, search.step_time.risk_adjusted
    earlier = [
        t for t in search.recalled if limits.allow(t) and not is_among(t.actions, search.trials)
    ]

    def fastest(here: Sequence[Trial], earlier: Sequence[Trial]) -> list[Trial]:
        most = (1 - gain) * min(map(seconds, here), default=math.inf)
        return sorted((t for t in earlier if seconds(t) < most), key=seconds)[:1]

    found = fastest(here, earlier)
    if search.codecs_by_default and all(t.cost.is_lossy for t in found):
        exact = lambda trials: [t for t in trials if not t.cost.is_lossy]
        found += fastest(exact(here), exact(earlier))
    return [ActionSolution.of(problem, t.actions) for t in found]


def settled(profile: Profile, solution: ActionSolution) -> Actions:
    """Returns actions of the same price in which a tag is KEEP if its tensor is stored in any case.
    An example is a tag of the block's input.

    The solver may return RECOMPUTE for such a tag, since both choices cost the same.
    """
    actions = solution.actions
    price = (solution.saved_bytes, solution.seconds)
    for label, choices in solution.actions.items():
        for tag, choice in choices.items():
            if choice.action.stores:
                continue
            other = actions | {label: actions[label] | {tag: KEEP}}
            cost = price_of(profile, other)
            if cost is not None and (cost.saved_bytes, cost.seconds) == price:
                # A tag that is not demanded costs the same if it is kept, and is not saved.
                saved = any(b.name == label and tag in dict(b.saved) for b in cost.blocks)
                actions = other if saved else actions
    return actions


def price_of(profile: Profile, actions: Actions) -> Cost | None:
    """Returns the price of an assignment; None if the assignment takes a choice without a price."""
    try:
        return evaluate(profile, actions)
    except TagError:  # for example, KEEP has no price if it is not among the allowed actions
        return None


def is_among(actions: Actions, others: Sequence[Trial | ActionSolution | CompiledStep]) -> bool:
    """Whether the assignment equals the assignment of one of `others`."""
    return any(alike(actions, other.actions) for other in others)


def distinct(solutions: Sequence[ActionSolution]) -> list[ActionSolution]:
    """The solutions without duplicates."""
    return [s for i, s in enumerate(solutions) if not is_among(s.actions, solutions[:i])]


def alike(actions: Actions, others: Actions) -> bool:
    """Whether two assignments are equal; an absent tag is recomputed."""
    return stored(actions) == stored(others)


def hand_policies(profile: Profile) -> dict[str, Actions]:
    """The policies that a user would try first, as assignments by name: JAX's `nothing_saveable`,
    JAX's `dots_saveable` for the tagged tensors, and every tag kept.
    """
    policies = {
        "nothing kept": lambda block: [],
        "products kept": _products,
        "every tag kept": lambda block: [tag.name for tag in block.tags],
    }
    by_name: dict[str, Actions] = {}
    for name, tags_of in policies.items():
        # Block classes of one label share their choices: a tag is kept if any class keeps it.
        actions = by_name.setdefault(name, profile.everything_recomputed)
        for block in profile.blocks:
            actions[block.name] |= dict.fromkeys(tags_of(block), KEEP)
    return {n: a for n, a in by_name.items() if price_of(profile, a) is not None}


def _products(block: BlockClass) -> list[str]:
    """The tags whose tensor is the result of a matrix product, or such a result after a bias, a
    cast or a view.
    """
    made_by = {v: equation for equation in block.equations for v in equation.outputs}
    names = []
    for equation in block.equations:
        if (tag := tag_at(block, equation)) is None:
            continue
        maker = made_by.get(equation.inputs[0])
        while maker is not None and not maker.matmuls:
            computed = [v for v in maker.inputs if v in made_by]
            maker = made_by[computed[0]] if len(computed) == 1 else None
        if maker is not None:
            names.append(tag.name)
    return names
