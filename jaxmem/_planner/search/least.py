"""The assignments of least bytes, which a budget is refused by.

A refusal rests on assignments that neither prices nor earlier plans choose: the least by liveness
estimates, with every price 0; full recomputation; and the least by saved bytes. They depend on the
step and on the choices that are open, and on no budget, no time and no earlier plan. So a budget
that is refused once is refused again, whatever is measured meanwhile.

The first choice was to refuse by the assignments that the search happened to compile. A budget was
then refused, and met minutes later with other measured times.
"""

from collections.abc import Sequence

from jaxmem._core.actions import Actions
from jaxmem._planner.search.candidates import is_among
from jaxmem._planner.search.factors import Factors, rescaled
from jaxmem._planner.search.local_search import local_search
from jaxmem._planner.search.state import Search
from jaxmem._planner.search.trial import Trial
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solution import Solution, priced
from jaxmem._planner.solve.solve import least_bytes


def least(search: Search, refused: Sequence[Actions] = ()) -> list[Solution]:
    """Returns what takes the least bytes by liveness estimates, which is remembered, full
    recomputation, and what saves the fewest bytes; each once.

    refused: what XLA did not compile.
    """
    problem = _timeless(search, refused)
    key = f"{sorted(problem.open_choices().items())} {problem.host_room} {problem.excluded}"
    known = search.history.recall_least(key)
    nothing: Actions = problem.profile.everything_recomputed
    saved = least_bytes(problem)
    starts = [nothing, *([] if saved is None else [saved.actions])]
    if known is None:
        found = local_search(starts, problem, search.estimates.estimate_for_least, 0.0)
        if found is not None:
            known = found.actions
            search.history.remember_least(key, known)
    return _each(search, [*([] if known is None else [known]), *starts])


def corrected(search: Search, known: Sequence[Trial], refused: Sequence[Actions]) -> list[Solution]:
    """Returns what takes the least bytes by liveness estimates that compiles correct; empty where
    nothing is estimated.

    known: what compiled of `least`.
    refused: what XLA did not compile.
    """
    problem = _timeless(search, refused)
    expected = search.estimates.expecting([(t.actions, t.working) for t in known])
    found = local_search([t.actions for t in known], problem, expected, 0.0)
    return _each(search, [] if found is None else [found.actions])


def _timeless(search: Search, refused: Sequence[Actions]) -> Problem:
    """The problem without a limit on device bytes, in which nothing takes time."""
    profile = rescaled(search.profile, Factors(0.0, 0.0, 0.0))
    return Problem(profile, None, search.limits.host_bytes, excluded=tuple(refused))


def _each(search: Search, many: Sequence[Actions]) -> list[Solution]:
    """Assignments with their prices, without what stands twice."""
    found = [priced(Problem(search.profile), actions) for actions in many]
    return [s for i, s in enumerate(found) if not is_among(s.actions, found[:i])]
