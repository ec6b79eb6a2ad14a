"""The table's lines: what each tag costs, and what the best plan without its choice would."""

import dataclasses
import re

import pytest

from jaxmem._core.actions import KEEP, REST
from jaxmem._core.profile import Option
from jaxmem._planner.outcome.table import rows
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import solve
from tests.shared import profiles
from tests.shared.profiles import INT4, block, chain, flat, oracle, profile

LAYERS = 3


def every_assignment(made):
    return [oracle(made, a) for a in profiles.assignments(made)]


@pytest.mark.parametrize("room", [9, 20, 40, 60, 90])
def test_why_is_the_dearer_plan_without_the_choice(room):
    made = profile(chain(layers=LAYERS, runs=LAYERS), link=100.0)
    got = solve(ActionProblem(made, room=room))
    priced = oracle(made, flat(got.actions))
    for row in rows(ActionProblem(made, room), got.actions):
        key = (row.block, row.tag)
        others = [
            p for p in every_assignment(made) if p.bytes <= room and p.effective[key] != row.choice
        ]
        if row.why == "nothing reads it again":
            assert {p.effective[key] for p in others if p.saved == priced.saved} <= {row.choice}
        elif row.why == "nothing else fits":
            assert not others
        else:
            choice, seconds = re.fullmatch(r"(\w+): \+([\d.]+) ms a step", row.why).groups()
            best = min(others, key=lambda p: p.priced)
            assert float(seconds) / 1e3 == pytest.approx(best.seconds - priced.seconds, abs=1e-3)
            assert choice in {
                p.effective[key].action.value for p in others if p.priced <= best.priced + 1e-3
            }


def test_why_tells_of_a_codec_that_gains_less_than_times_are_known_to():
    """Compressed, "u" of `chain` takes 0.4 s where it takes 0.1 s kept: here it takes 0.05 s."""
    made = chain(layers=LAYERS, runs=LAYERS)
    faster = dataclasses.replace(made.tags[0].options[1], seconds=0.05)
    options = (made.tags[0].options[0], faster)
    made = profile(dataclasses.replace(made, tags=(replaced(made.tags[0], options), made.tags[1])))
    certain, doubted = made, profiles.doubted(made, 0.12, 0.2)
    choices = []
    for step in (certain, doubted):
        problem = ActionProblem(step, 3 * 99)
        solution = solve(problem)
        choices.append(solution.actions["block"]["u"])
        row = next(r for r in rows(problem, solution.actions) if r.tag == "u")
        assert row.milliseconds == pytest.approx(50 if step is certain else 100), "true times"
    assert choices == [INT4, KEEP]
    assert row.why == "compress: -150.000 ms a step, but times are 12 % uncertain"


def replaced(tag, options):
    return dataclasses.replace(tag, options=options)


def test_a_name_of_two_places_is_one_line():
    """x -> a -> tag "u" -> b (twice the bytes) -> tag "u" again."""
    equations = [
        ([0], [1], 1.0, None),
        ([1], [2], 0.0, "u"),
        ([2], [3], 2.0, None),
        ([3], [4], 0.0, "u"),
    ]
    options = [("u", [Option(KEEP, size, 0, size / 100)]) for size in (10, 20)]
    made = profile(block(equations, [2, 4], [5, 10, 10, 20, 20], options))
    (kept,) = rows(ActionProblem(made, 30), {"block": {"u": KEEP}})
    assert (kept.count, kept.bytes_before, kept.bytes_after) == (2, 30, 30)
    assert kept.milliseconds == pytest.approx(1e3 * 0.3)
    (again,) = rows(ActionProblem(made, 29), {"block": {}})
    assert (again.count, again.bytes_before, again.bytes_after) == (2, 30, 0)
    assert again.milliseconds == pytest.approx(1e3 * 3)
    assert (again.size, kept.size) == ("2 x (1)", "2 x (1)")


def test_no_choice_is_explained_where_everything_fits():
    made = profile(chain())
    actions = {"block": {"u": KEEP, "v": KEEP, REST: KEEP}}
    assert {r.why for r in rows(ActionProblem(made, 0), actions)} == {"everything fits"}
