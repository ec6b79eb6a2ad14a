"""The part of a budget that a plan may use, and the budget that some bytes need."""

import types

import hypothesis.strategies as st
from hypothesis import given

from jaxmem._planner.search.trial import Limits


@given(nbytes=st.integers(1, 10**13), margin=st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.3]))
def test_the_least_budget_has_room_for_the_bytes_and_no_smaller_one_has(nbytes, margin):
    backend = types.SimpleNamespace(margin=margin)
    usable = lambda budget: Limits.on(backend, budget, 0).usable_bytes
    needed = Limits.on(backend, 100, 0).budget_for(nbytes)
    assert usable(needed - 1) < nbytes <= usable(needed)
