"""An assignment of choices to tags with its price. The price comes from the cost model (`cost.py`),
which shares no code with the mixed-integer program.
"""

import dataclasses
import math

from jaxmem._core.actions import Actions
from jaxmem._core.profile import Profile
from jaxmem._planner.solve.cost import Cost, effective, evaluate
from jaxmem._planner.solve.problem import ActionProblem, keys_of

ROUNDING = 0.5  # bytes by which rounding may move the working memory of a solution


@dataclasses.dataclass(frozen=True)
class ActionSolution:
    """An assignment and its price.

    actions: choices for every tag. Tags that are not demanded are recomputed.
    cost: the price by `evaluate`.
    working_bytes: working memory beyond the memory model's reference; may be negative.
    solve_seconds: seconds that the solver took.
    gap: the share of the solution's time by which the optimum may be faster, as proven by the
      solver: 0 for a proven optimum, infinity if the solver proved no bound.
    """

    actions: Actions
    cost: Cost
    working_bytes: int
    solve_seconds: float = 0.0
    gap: float = 0.0

    @staticmethod
    def of(
        problem: ActionProblem, actions: Actions, solve_seconds=0.0, gap=0.0
    ) -> "ActionSolution":
        """Returns an assignment as an ActionSolution, whether or not it meets the problem's limits.

        problem: the profile, and the working memory of each choice.
        actions: the assignment, which need not name every tag.
        solve_seconds, gap: the fields of the ActionSolution.

        Raises TagError if the assignment names a block, tag or choice that the profile lacks.
        """
        cost = evaluate(problem.profile, actions)
        actions = effective(problem.profile, actions, cost)
        # fsum rounds once, so that the sum does not depend on the order of the tags.
        extra = math.fsum(problem.working.get(key, 0.0) for key in keys_of(actions))
        return ActionSolution(actions, cost, round(extra), solve_seconds, gap)

    @property
    def saved_bytes(self) -> int:
        return self.cost.saved_bytes

    @property
    def host_bytes(self) -> int:
        return self.cost.host_bytes

    @property
    def seconds(self) -> float:
        return self.cost.seconds

    @property
    def risk_adjusted_seconds(self) -> float:
        """The seconds by which solutions are ranked (`Cost.risk_adjusted_seconds`)."""
        return self.cost.risk_adjusted_seconds

    @property
    def bytes(self) -> int:
        """The bytes that `ActionProblem.room` limits: saved bytes, and working memory beyond the
        reference.
        """
        return self.saved_bytes + self.working_bytes


def corrected_seconds(problem: ActionProblem, solution: ActionSolution) -> float:
    """Returns the seconds of a solution plus the problem's corrections of its choices."""
    more = (problem.corrections.get(key, 0.0) for key in keys_of(solution.actions))
    return math.fsum([solution.seconds, *more])


def fits(solution: ActionSolution, problem: ActionProblem) -> bool:
    """Whether the solution is within the problem's `room` and `host_room`."""
    room, host_room = problem.room, problem.host_room
    over = room is not None and solution.bytes > room + ROUNDING
    return not over and (host_room is None or solution.host_bytes <= host_room)


def demanded(profile: Profile, solution: ActionSolution, block: str, tag: str) -> bool:
    """Whether the tag's tensor is saved, or would be saved under another choice.

    The effective choice is RECOMPUTE both for a tag whose choice is RECOMPUTE and for a tag that is
    not demanded. Only a demanded tag is saved under another choice.
    """
    if solution.actions[block][tag].action.stores:
        return True
    options = ActionProblem(profile).open_choices()[block, tag]
    other = next((c for c in options if c.action.stores), None)
    if other is None:
        return False
    changed = solution.actions | {block: solution.actions[block] | {tag: other}}
    return effective(profile, changed)[block][tag] == other
