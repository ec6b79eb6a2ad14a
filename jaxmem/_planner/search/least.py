"""The assignments of least bytes. A budget is refused if none of them fits.

Neither prices nor earlier plans influence these assignments: the assignment of least bytes by
liveness estimates, with every price 0; full recomputation; and the assignment of fewest saved
bytes. They depend on the step and on its open choices, and not on the budget, on times or on
earlier plans. So a budget that is refused once is refused again, whatever times are measured in
the meantime.

The first choice was to refuse a budget by the assignments that the search happened to compile. A
budget was then refused, and was met minutes later with other measured times.
"""

from collections.abc import Sequence

from jaxmem._core.actions import Actions
from jaxmem._planner.search.candidates import distinct
from jaxmem._planner.search.factors import Factors, rescaled
from jaxmem._planner.search.local_search import local_search
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from jaxmem._planner.solve.solve import least_bytes


def least(search: Search) -> list[ActionSolution]:
    """Returns the assignment of least bytes by liveness estimates, full recomputation, and the
    assignment of fewest saved bytes, without duplicates. The first of them is stored for later
    searches.
    """
    problem = _timeless(search)
    key = f"{sorted(problem.open_choices().items())} {problem.host_room} {problem.excluded}"
    known = search.history.recall_least(key)
    nothing: Actions = problem.profile.everything_recomputed
    kept = problem.profile.everything_kept
    saved = least_bytes(problem)
    starts = [nothing, *([] if saved is None else [saved.actions])]
    if known is None:
        # A block may take more bytes under a checkpoint than without one.
        begin = [*starts, *(nothing | {b: kept[b]} for b in kept if len(kept) > 1)]
        estimate = lambda actions: search.estimates.estimate(actions, "least")
        smallest = local_search(begin, problem, estimate, 0.0)
        if smallest is not None:
            known = smallest.actions
            search.history.remember_least(key, known)
    return _each(search, [*([] if known is None else [known]), *starts])


def near_least(search: Search, known: Sequence[Trial]) -> list[ActionSolution]:
    """Returns the assignment of least bytes by liveness estimates that are corrected by compiles;
    empty if no assignment could be estimated.

    known: the compiled assignments of `least`.
    """
    problem = _timeless(search)
    expected = search.estimates.expecting([(t.actions, t.working) for t in known])
    smallest = local_search([t.actions for t in known], problem, expected, 0.0)
    return _each(search, [] if smallest is None else [smallest.actions])


def _timeless(search: Search) -> ActionProblem:
    """The problem without a limit on device bytes, in which every price is 0. Assignments that XLA
    did not compile are excluded.
    """
    profile = rescaled(search.profile, Factors(0.0, 0.0, 0.0))
    problem = ActionProblem(profile, None, search.limits.host_bytes, excluded=tuple(search.refused))
    return problem.lossless() if search.lossless else problem


def _each(search: Search, many: Sequence[Actions]) -> list[ActionSolution]:
    """Assignments with their prices, without duplicates."""
    return distinct([ActionSolution.of(ActionProblem(search.profile), actions) for actions in many])
