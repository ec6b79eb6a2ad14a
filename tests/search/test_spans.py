"""Layers in spans, against brute force over every number of layers and every assignment."""

import dataclasses

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.groups import in_spans, spannable
from jaxmem._planner.search.spans import best_in_spans, numbers_of
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes
from tests.shared.profiles import PRICE, assignments, chain, nested, options, oracle, profile

few = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


@st.composite
def stacks(draw):
    """A chain of two tags with options of random prices, several layers deep."""
    layers, again = draw(st.integers(2, 9)), draw(st.integers(0, 40)) / 10
    size = draw(st.integers(0, 60))  # of a layer's input
    made = chain(layers=layers, runs=2 * layers, divisible=layers, rerun_seconds=again)
    drawn = draw(options(40)), draw(options(80))
    tags = tuple(dataclasses.replace(t, options=o) for t, o in zip(made.tags, drawn))
    return profile(dataclasses.replace(made, values=(size, 40, 40, 80, 80), tags=tags))


def by_hand(made, span):
    """(saved bytes, host bytes, seconds, assignment) of each assignment in spans: the tensors of
    `span` layers are alive together, in addition to one input a span.
    """
    (block,) = made.blocks
    spans = block.divisible // span
    alive = dataclasses.replace(made, blocks=(dataclasses.replace(block, layers=span),))
    for assignment in assignments(made):
        price = oracle(alive, assignment)
        again = PRICE * spans * span * (block.runs // block.divisible) * block.rerun_seconds
        saved = price.saved + spans * block.values[block.inputs[0]]
        yield saved, price.host, price.priced + again, assignment


def every(made):
    return [p for span in range(2, made.blocks[0].divisible) for p in by_hand(made, span)]


@few
@given(st.data())
def test_the_best_spans_are_those_of_brute_force(data):
    made = data.draw(stacks())
    rooms = st.integers(0, 180 * made.blocks[0].layers)
    room, host_room = data.draw(rooms), data.draw(rooms)
    got = best_in_spans(ActionProblem(made, room, host_room))
    fitting = (
        seconds for saved, host, seconds, _ in every(made) if saved <= room and host <= host_room
    )
    want = min(fitting, default=None)
    assert (got is None) == (want is None)
    if got is None:
        return
    solution = got[1]
    assert solution.bytes <= room
    assert solution.host_bytes <= host_room
    priced = solution.risk_adjusted_seconds + (PRICE - 1) * solution.cost.recompute_seconds
    assert priced == pytest.approx(want, rel=2e-3, abs=1e-3)


@few
@given(st.data())
def test_the_least_bytes_are_those_of_brute_force(data):
    made = data.draw(stacks())
    got = best_in_spans(ActionProblem(made), least_bytes)
    want = min((saved for saved, *_ in every(made)), default=None)
    assert (None if got is None else got[1].bytes) == want


@few
@given(st.data())
def test_the_price_in_spans_is_counted_by_hand(data):
    made = data.draw(stacks())
    if made.blocks[0].divisible < 3:
        return
    span = data.draw(st.integers(2, made.blocks[0].divisible - 1))
    spanned = in_spans(made, made.blocks[0], span)
    (label,) = (b.name for b in spanned.blocks)
    assert label == f"block[0:{made.blocks[0].divisible}:{span}]"
    for saved, host, seconds, assignment in by_hand(made, span):
        cost = evaluate(spanned, {label: nested(assignment, made)["block"]})
        assert (cost.saved_bytes, cost.host_bytes) == (saved, host)
        priced = cost.risk_adjusted_seconds + (PRICE - 1) * cost.recompute_seconds
        assert priced == pytest.approx(seconds)


@pytest.mark.parametrize("saved", [0, 1, 3, 10, 30])
def test_the_numbers_that_are_tried_are_near_the_least_bytes(saved):
    """`saved`: what a layer saves beside its input, in inputs."""
    for layers in range(3, 400):
        bytes_of = lambda k, n=layers: n // k + k * (1 + saved)
        least = min(map(bytes_of, range(2, layers)))
        assert min(map(bytes_of, numbers_of(layers))) <= 1.06 * least + 1
        assert len(numbers_of(layers)) <= 24


def test_a_solution_that_is_too_slow_is_of_no_use():
    made = profile(chain(layers=6, runs=6, divisible=6, rerun_seconds=1.0))
    best = best_in_spans(ActionProblem(made, 100))
    seconds = best[1].risk_adjusted_seconds
    same = best_in_spans(ActionProblem(made, 100), most_seconds=seconds)
    assert same[1].risk_adjusted_seconds == pytest.approx(seconds)
    assert best_in_spans(ActionProblem(made, 100), most_seconds=0.99 * seconds) is None


def test_blocks_whose_loop_runs_no_spans_have_none():
    alone = chain(layers=6, runs=6, divisible=6)
    assert spannable(profile(alone)) == []
    assert best_in_spans(ActionProblem(profile(alone))) is None
    loop = dataclasses.replace(alone, name="loop", rerun_seconds=0.5)
    (problem, _) = best_in_spans(ActionProblem(profile(alone, loop)), least_bytes)
    names = [b.name for b in problem.profile.blocks]
    assert names[0] == "block"
    assert names[1].startswith("loop[0:6:")
