"""Groups of layers: their labels, profiles that are divided, and the best division against brute
force.
"""

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.actions import RECOMPUTE
from jaxmem._core.groups import as_decided, divided, divisible, group_label, ranges, ungrouped
from jaxmem._planner.divide import best_division
from jaxmem._planner.trials import Expected
from jaxmem._solver.memory import MemoryModel
from jaxmem._solver.solve import solve
from tests.shared.profiles import (
    assignments,
    block,
    chain,
    flat,
    nested,
    options,
    oracle,
    prices,
    profile,
)

pytestmark = pytest.mark.core
few = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


def test_labels():
    assert group_label("block", 0, 6) == "block[0:6]"
    assert ungrouped("block[0:6]") == ungrouped("block") == "block"
    assert ungrouped("a[b]") == "a[b]"
    labels = ["block[6:12]", "block", "other[0:1]", "block[0:6]"]
    assert ranges(labels, "block") == [(0, 6), (6, 12)]


def test_a_divided_profile_is_the_same_step():
    made = profile(chain(layers=6, runs=12, stacked=True), chain(name="other"))
    split = divided(made, made.blocks[0], 2)
    assert [(b.name, b.layers, b.runs) for b in split.blocks] == [
        ("block[0:2]", 2, 4), ("block[2:6]", 4, 8), ("other", 1, 1)
    ]  # fmt: skip
    assert as_decided(made.blocks, ["block", "other"]) == made.blocks


@pytest.mark.parametrize("change", [{"stacked": False}, {"layers": 1}])
def test_only_a_stack_of_layers_is_divided(change):
    assert divisible(profile(chain(**({"layers": 4, "stacked": True} | change)))) is None
    assert divisible(profile(chain(layers=4, stacked=True), chain(layers=2))) is None, (
        "two classes of one label"
    )


def expected(made, transients) -> Expected:
    """A model that knows these transients, and a reference of nothing."""
    first = nested(next(assignments(made)), made)
    assert all(c == RECOMPUTE for tags in first.values() for c in tags.values())
    return Expected(
        MemoryModel.fit([(first, 0.0)], made), {k: s for k, s in transients.items() if s}
    )


@st.composite
def stacks(draw):
    """A chain of two tags with options of random prices, several layers deep."""
    u, v = draw(options(40)), draw(options(80))
    equations = [
        ([0], [1], 1.0, None),
        ([1], [2], 0.0, "u"),
        ([2], [3], 2.0, None),
        ([3], [4], 0.0, "v"),
    ]
    layers = draw(st.integers(2, 5))
    return profile(
        block(
            equations,
            [2, 4],
            [20, 40, 40, 80, 80],
            {"u": u, "v": v},
            layers=layers,
            runs=layers,
            stacked=True,
        )
    )


@few
@given(st.data())
def test_the_best_division_is_that_of_brute_force(data):
    made = data.draw(stacks())
    rooms = st.integers(0, 130 * made.blocks[0].layers)
    room, host_room = data.draw(rooms), data.draw(rooms)
    got = best_division(made, expected(made, {}), room, host_room)
    splits = (divided(made, made.blocks[0], n) for n in range(1, made.blocks[0].layers))
    known = [p for split in splits for p in prices(split)]
    want = min((p.priced for p in known if p.bytes <= room and p.host <= host_room), default=None)
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    again = oracle(got.profile, flat(got.solution.actions))
    assert again.saved == got.bytes <= room
    assert again.host <= host_room
    assert again.priced == pytest.approx(want, rel=2e-3, abs=1e-3)  # recomputing breaks ties only


@few
@given(st.data())
def test_working_memory_is_that_of_the_last_group_or_of_the_first_alone(data):
    made = data.draw(stacks())
    model = expected(made, {("block", t, RECOMPUTE): 40 for t in ("u", "v")})
    size = {
        t: model.transients.get(("block", t, RECOMPUTE), 0) for t in ("u", "v")
    }  # in whole units
    room = data.draw(st.integers(0, 170 * made.blocks[0].layers))
    two = best_division(made, model, room, 10**6)
    if two is not None:
        chosen = [(b, two.solution.actions[b.name]) for b in two.profile.blocks]
        first, last = (
            oracle(profile(b), {(b.name, t): c for t, c in tags.items()}) for b, tags in chosen
        )
        extra = lambda price: sum(
            size[t] for (_, t), c in price.effective.items() if c == RECOMPUTE
        )
        assert (
            two.bytes
            == max(first.saved + last.saved + extra(last), first.saved + extra(first))
            <= room
        )
    one = solve(made, room=room - sum(size.values()), transients=model.transients, host_room=10**6)
    if one is not None:  # with room for the plan that is too careful
        assert two is not None
        assert two.solution.seconds <= one.seconds * (1 + 1e-3) + 1e-3
