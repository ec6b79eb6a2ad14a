"""What a search may compile next: pure functions of the search, the model and the problem.

Each function returns candidates with their predicted price. `search.py` decides how many of them
are compiled, and leaves out those that were compiled before.
"""

import math
from collections.abc import Callable, Sequence

from jaxmem._core.actions import KEEP, RECOMPUTE, Actions, stored
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.search import candidates
from jaxmem._planner.search.compile import CompiledStep
from jaxmem._planner.search.local_search import local_search
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.cost import Cost, evaluate, tag_at
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution, priced
from jaxmem._planner.solve.solve import least_bytes, solve
from jaxmem.errors import TagError

# Shares of the room that candidates are solved for. A prediction may be too low, and the plan for a
# smaller share still fits then.
SHARES = (1.0, 0.985, 0.96)
NEARLY = 1.002  # of the room: predictions are no truer, and the solver counts in units of bytes


def fastest(problem: Problem) -> Solution | None:
    """Returns the solver's answer with its actions `settled`, or None where no assignment fits."""
    solution = solve(problem)
    if solution is None:
        return None
    return priced(problem, settled(problem.profile, solution), solution.solve_seconds, solution.gap)


def within_budget(search: Search, count: int) -> list[Solution]:
    """Returns the fastest assignment for each of the first `count` of `SHARES` of the usable bytes.
    Each share but the first is reduced by the largest underprediction of this search. Assignments
    that estimates do not expect to fit are left out.
    """
    short = _short(search)
    shares = [SHARES[0], *(share - short for share in SHARES[1:])][:count]
    found = [search.agreed(fastest, share) for share in shares]
    most = NEARLY * search.limits.usable_bytes
    return [s for s in found if s is not None and search.expected(s) <= most]


def _short(search: Search) -> float:
    """The share of the room by which a prediction was short at most. The first trial's is left
    out, since no plan had taught anything before it; the least of `SHARES` allows for a little.
    """
    errors = [(t.total - t.predicted_bytes) / search.limits.usable_bytes for t in search.tried[1:]]
    return max([0.0, *(error - (1 - SHARES[1]) for error in errors)])


def nearest(search: Search) -> list[Solution]:
    """Returns, for a search in which nothing fits yet, assignments that may, at least one: first
    what small changes find, judged by estimates, and then the assignment of fewest bytes by the
    memory model, and full recomputation. The latter two are unlike the first, which estimates may
    be wrong about.
    """
    by_model = search.agreed(least_bytes)
    nothing = priced(search.problem(search.model()), search.profile.everything_recomputed)
    unlike = [s for s in (by_model, nothing) if s is not None]
    usable = [t for t in search.compiled if not (search.lossless and t.cost.is_lossy)]
    smallest = min(usable, key=lambda t: t.total).actions
    starts = [smallest, *(s.actions for s in unlike)]
    found = _descended(search, starts)
    if found is None:
        return unlike
    # What is expected to fit may not; what is not, is the same for every share of the room.
    fits = search.expected(found) <= search.limits.usable_bytes
    second = _descended(search, starts, SHARES[1]) if fits else None
    return [found, *([] if second is None else [second]), *unlike]


def _descended(search: Search, starts: Sequence[Actions], share: float = 1.0) -> Solution | None:
    """The fastest plan that estimates expect to fit a `share` of the room, found by small changes
    of `starts`; the one nearest to it where none fits, None once estimates took too long.
    """
    known = [(t.actions, t.working) for t in (*search.compiled, *search.recalled)]
    room = search.limits.usable_bytes * share - search.static
    expected = search.estimates.expecting(known)
    return local_search(starts, search.problem(search.model()), expected, room)


def recalled(
    search: Search, problem: Problem, seconds: Callable[[Trial], float]
) -> Solution | None:
    """Returns the fastest plan that an earlier search saw compile within this budget, if this
    search has none so fast yet. `seconds` tells what trials are ranked by.
    """
    best = min((seconds(t) for t in search.within_budget), default=math.inf)
    limits = search.limits
    faster = [
        t
        for t in search.recalled
        if limits.allow(t)
        if seconds(t) < best
        if not is_among(t.actions, search.compiled)
    ]
    if not faster:
        return None
    return priced(problem, min(faster, key=seconds).actions)


def settled(profile: Profile, solution: Solution) -> Actions:
    """Returns actions of the same price in which a tag is called kept where its tensor is kept
    anyway, such as a tag of the block's own input.

    The solver may call such a tag recomputed, since both cost the same.
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
    """Returns the price of an assignment, or None where it takes a choice that has none."""
    try:
        return evaluate(profile, actions)
    except TagError:  # such as keep, where it is not among the actions allowed
        return None


def is_among(actions: Actions, others: Sequence[Trial | Solution | CompiledStep]) -> bool:
    """Whether the assignment is one of these."""
    return any(alike(actions, other.actions) for other in others)


def alike(actions: Actions, others: Actions) -> bool:
    """Whether two assignments are the same; a tag that is absent is recomputed."""
    return stored(actions) == stored(others)


def _is_saved(cost: Cost, label: str, tag: str) -> bool:
    """Whether the tag takes effect: one that nothing demands costs the same kept, and stays
    recomputed.
    """
    return any(b.name == label and tag in dict(b.saved) for b in cost.blocks)


def hand_policies(profile: Profile) -> dict[str, Actions]:
    """The policies that one would try first, as assignments by name: JAX's `nothing_saveable`, its
    `dots_saveable` as far as there are tags, and all names.
    """
    of_each = {
        "nothing kept": lambda block: [],
        "products kept": _products,
        "every tag kept": lambda block: [tag.name for tag in block.tags],
    }
    found: dict[str, Actions] = {}
    for name, tags_of in of_each.items():
        # Classes of one label share their decisions: a tag is kept if any of them would keep it.
        actions = found.setdefault(name, profile.everything_recomputed)
        for block in profile.blocks:
            actions[block.name] |= dict.fromkeys(tags_of(block), KEEP)
    return {n: a for n, a in found.items() if candidates.price_of(profile, a) is not None}


def _products(block: BlockClass) -> list[str]:
    """The tags whose tensor is the result of a matrix product, or what a bias, a cast or a view
    makes of one.
    """
    made = {v: equation for equation in block.equations for v in equation.outputs}
    found = []
    for equation in block.equations:
        if (tag := tag_at(block, equation)) is None:
            continue
        maker = made.get(equation.inputs[0])
        while maker is not None and not maker.matmuls:
            own = [v for v in maker.inputs if v in made]
            maker = made[own[0]] if len(own) == 1 else None
        if maker is not None:
            found.append(tag.name)
    return found
