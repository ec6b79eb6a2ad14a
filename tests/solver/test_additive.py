"""The fit of what whole steps taught: exact on what was compiled, sane on what was not."""

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, UNTAGGED
from jaxmem._core.profile import Option
from jaxmem._planner.solve.additive import Additive
from jaxmem.errors import SolverError, TagError
from tests.shared.independent import independent
from tests.shared.profiles import INT4

MiB = 2**20
SIZES = {"a": 100 * MiB, "b": 40 * MiB, "c": 4 * MiB, "d": 1024}
CHOICES = (RECOMPUTE, KEEP, INT4, OFFLOAD)


def step():
    options = lambda size: [
        Option(KEEP, size, 0, 0.1),
        Option(INT4, size // 4, 0, 0.2),
        Option(OFFLOAD, 0, size, 0.3),
    ]
    return independent({name: (1.0, size, options(size)) for name, size in SIZES.items()}, MiB)


def plan(*choices):
    return {"block": dict(zip(SIZES, choices))}


def additive(model, actions):
    keys = [("block", tag, choice) for tag, choice in actions["block"].items()]
    return model.reference + sum(model.by_choice.get(k, 0.0) for k in keys)


plans = st.tuples(*[st.sampled_from(CHOICES)] * len(SIZES)).map(lambda c: plan(*c))
histories = st.lists(
    st.tuples(plans, st.integers(100 * MiB, 2000 * MiB)),
    min_size=1,
    max_size=8,
    unique_by=lambda h: str(h[0]),
)


@hypothesis.settings(max_examples=100, deadline=None)
@given(histories)
def test_what_was_compiled_is_predicted_as_it_was_measured(history):
    model = Additive.fit(history, step())
    assert model.reference == history[0][1]
    for actions, size in history:
        assert model.predict(actions) == pytest.approx(size, rel=1e-3)


@hypothesis.settings(max_examples=100, deadline=None)
@given(histories)
def test_the_corrections_alone_give_the_history_wherever_a_sum_can(history):
    model = Additive.fit(history, step())
    first = history[0][0]["block"]
    keys = [(t, c) for t in SIZES for c in CHOICES if c != first[t]]
    design = np.array(
        [[actions["block"][t] == c for t, c in keys] for actions, _ in history[1:]], float
    )
    hypothesis.assume(len(history) == 1 or np.linalg.matrix_rank(design) == len(history) - 1)
    for actions, size in history:
        assert additive(model, actions) == pytest.approx(size, rel=1e-3)


def test_one_observation_is_a_constant():
    model = Additive.fit([(plan(KEEP, KEEP, KEEP, KEEP), 500 * MiB)], step())
    assert not model.by_choice
    assert model.predict(plan(INT4, RECOMPUTE, KEEP, OFFLOAD)) == 500 * MiB
    assert Additive.fit([({"block": {UNTAGGED: KEEP}}, 9)], step()).predict(plan(*[KEEP] * 4)) == 9


@pytest.mark.parametrize("change", [-60 * MiB, 60 * MiB])
def test_a_change_is_put_down_to_the_largest_tags_first(change):
    base = plan(*[KEEP] * 4)
    model = Additive.fit([(base, 500 * MiB), (plan(*[INT4] * 4), 500 * MiB + change)], step())
    shares = [model.by_choice["block", tag, INT4] / change for tag in SIZES]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(
        100**2 / (100**2 + 40**2 + 4**2), rel=1e-3
    )  # prior variance: bytes squared
    assert model.predict(plan(INT4, KEEP, KEEP, KEEP)) == pytest.approx(
        500 * MiB + shares[0] * change
    )


def test_plans_without_choices_are_remembered_and_teach_nothing():
    without = {"block": {UNTAGGED: KEEP}}
    model = Additive.fit([(without, 7 * MiB), (plan(*[RECOMPUTE] * 4), 90 * MiB)], step())
    assert model.reference == 90 * MiB
    assert model.predict(without) == 7 * MiB
    assert model.predict(plan(KEEP, *[RECOMPUTE] * 3)) == 90 * MiB


def test_of_one_plan_measured_twice_the_larger_counts():
    kept = plan(*[KEEP] * 4)
    assert Additive.fit([(kept, 5), (kept, 7), (kept, 6)], step()).predict(kept) == 7


def test_histories_that_cannot_be_used():
    with pytest.raises(SolverError, match="`history` is empty"):
        Additive.fit([], step())
    with pytest.raises(SolverError, match="`history` has nan"):
        Additive.fit([(plan(*[KEEP] * 4), float("nan"))], step())
    with pytest.raises(TagError, match=r"names tags \['z'\]"):
        Additive.fit([({"block": {"z": KEEP}}, 1)], step())
