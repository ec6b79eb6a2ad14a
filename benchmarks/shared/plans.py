"""Plans of every kind for a case: one action for all tags, random ones, and solved ones."""

import random

from benchmarks.shared.case import Case
from jaxmem._core.actions import RECOMPUTE, Action, Actions
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import Problem
from jaxmem._planner.solve.solve import solve

ROOMS = (0.5, 0.2, 0.08)  # of the bytes of all tags


def plans(case: Case) -> dict[str, Actions]:
    tags = [(b.name, t) for b in case.profile.blocks for t in b.tags]
    first = lambda tag, action: next(
        (o.choice for o in tag.options if o.choice.action is action), RECOMPUTE
    )
    found = {
        "keep everything": case.keep_everything,
        "keep": case.keep_tags,
        "recompute": {b.name: {} for b in case.profile.blocks},
    }
    for action in (Action.COMPRESS, Action.OFFLOAD, Action.COMPRESS_OFFLOAD):
        if any(first(t, action) != RECOMPUTE for _, t in tags):
            found[action.value] = _nested((b, t.name, first(t, action)) for b, t in tags)
    choices = Problem(case.profile).open_choices()
    for seed in range(3):
        pick = random.Random(f"{case.config.model.width} {seed}").choice
        found[f"random {seed}"] = _nested((b, t, pick(open_)) for (b, t), open_ in choices.items())
    most = evaluate(case.profile, case.keep_tags).saved_bytes
    for share in ROOMS:
        solution = solve(Problem(case.profile, room=int(share * most)))
        if solution is not None:
            found[f"solved {share}"] = solution.actions
    return found


def _nested(entries) -> Actions:
    result: Actions = {}
    for block, tag, choice in entries:
        result.setdefault(block, {})[tag] = choice
    return result
