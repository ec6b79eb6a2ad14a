"""Small changes, each judged by an estimate, find what the solver's sums do not."""

import itertools
import math

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, RECOMPUTE, REST
from jaxmem._planner.search.local_search import PATIENCE, local_search
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solution import ActionSolution
from tests.shared.profiles import chain, profile

pytestmark = pytest.mark.core
MADE = profile(chain(layers=4, runs=4))
NOTHING = {"block": {}}
CHOICES = ActionProblem(MADE).open_choices()


def everything_priced():
    """Every assignment there is, with its price."""
    for chosen in itertools.product(*CHOICES.values()):
        actions = {"block": {tag: choice for (_, tag), choice in zip(CHOICES, chosen)}}
        yield ActionSolution.of(ActionProblem(MADE), actions)


ALL = {repr(sorted(s.actions["block"].items())): s for s in everything_priced()}


def of(sizes):
    """Bytes of an assignment: the most of two moments, which choices change by what is drawn."""

    def beside(actions) -> float:
        chosen = [
            CHOICES["block", tag].index(actions["block"].get(tag, RECOMPUTE)) for _, tag in CHOICES
        ]
        moments = (sum(s[m][c] for s, c in zip(sizes, chosen)) for m in (0, 1))
        return max(moments)

    return beside


drawn = st.lists(
    st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=2, max_size=2),
    min_size=len(CHOICES),
    max_size=len(CHOICES),
)


@hypothesis.settings(max_examples=60, deadline=None)
@given(drawn, st.integers(0, 25))
def test_what_it_returns_is_no_worse_than_any_start_and_is_told_the_truth(sizes, room):
    beside = of(sizes)
    found = local_search([NOTHING], ActionProblem(MADE), beside, room)
    assert found is not None
    over = lambda s: max(0, beside(s.actions) - room)
    start = ActionSolution.of(ActionProblem(MADE), NOTHING)
    assert over(found) <= over(start)
    if over(start) == 0:
        assert found.risk_adjusted_seconds <= start.risk_adjusted_seconds
    # and it does so again: nothing is left to luck
    assert local_search([NOTHING], ActionProblem(MADE), beside, room) == found


def test_it_finds_the_optimum_of_a_small_step():
    """Two moments: one choice at a time gains nothing, as either moment stays the most."""
    names = [tag for _, tag in CHOICES]
    first, second = names[:2]

    def beside(actions) -> float:
        kept = {tag for tag, c in actions["block"].items() if c == KEEP}
        return max(10 - 4 * (first in kept), 10 - 4 * (second in kept)) + len(
            kept - {first, second}
        )

    least = min(beside(s.actions) for s in ALL.values())
    assert least == 6
    found = local_search([NOTHING], ActionProblem(MADE), beside, 0)
    assert found is not None
    assert beside(found.actions) == least
    # with room for 10, the fastest of all is found
    roomy = local_search([NOTHING], ActionProblem(MADE), beside, 10)
    fitting = [s.risk_adjusted_seconds for s in ALL.values() if beside(s.actions) <= 10]
    assert roomy is not None
    assert roomy.risk_adjusted_seconds == pytest.approx(min(fitting))


def test_it_keeps_to_host_memory_and_to_what_xla_compiles():
    # What is moved to the host takes least on the device.
    beside = lambda a: sum(not c.action.offloads for c in a["block"].values())
    free = local_search([NOTHING], ActionProblem(MADE), beside, 0)
    assert free is not None
    assert free.host_bytes > 0
    bound = local_search([NOTHING], ActionProblem(MADE, host_room=0), beside, 0)
    assert bound is not None
    assert bound.host_bytes == 0
    refused = local_search([NOTHING], ActionProblem(MADE, excluded=(free.actions,)), beside, 0)
    assert refused is not None
    assert refused.actions != free.actions


def test_a_block_that_keeps_everything_is_changed_too():
    beside = lambda a: 10.0 if REST in a["block"] else 5.0
    found = local_search([MADE.everything_kept], ActionProblem(MADE), beside, 5)
    assert found is not None
    assert beside(found.actions) == 5
    assert math.isinf(found.gap), "nothing is proven"


def test_it_ends_when_walks_do_and_where_nothing_improves():
    asked = []

    def beside(actions):
        asked.append(actions)
        return 5.0 if len(asked) < 4 else None

    found = local_search([NOTHING], ActionProblem(MADE), beside, 0)
    assert found is not None
    assert len(asked) == 4
    assert local_search([NOTHING], ActionProblem(MADE), lambda _: None, 0) is None
    asked.clear()
    count = lambda actions: asked.append(actions) or 5.0
    local_search([NOTHING], ActionProblem(MADE), count, 0)
    # equal bytes are ranked by what moves to the host and by time, which end too
    assert len(asked) <= min(len(ALL), 4 * PATIENCE)
    assert len(asked) == len({repr(a) for a in asked})
