"""Where a stack's layers are divided, against brute force over every position and assignment.
Layers in spans, against brute force over every number of layers and every assignment.
"""

import dataclasses

import hypothesis
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, RECOMPUTE, UNTAGGED
from jaxmem._core.groups import divided, divisible, in_spans, spannable
from jaxmem._core.profile import Option
from jaxmem._planner.search.divide import best_division
from jaxmem._planner.search.spans import best_in_spans, numbers_of
from jaxmem._planner.solve.additive import Additive
from jaxmem._planner.solve.cost import evaluate
from jaxmem._planner.solve.memory import working_bytes
from jaxmem._planner.solve.problem import ActionProblem
from jaxmem._planner.solve.solve import least_bytes, solve
from tests.shared import profiles
from tests.shared.profiles import (
    PRICE,
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

few = hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


def expected(made, working) -> Additive:
    """A model that knows this working memory, and a reference of nothing."""
    first = profiles.nested(next(profiles.assignments(made)), made)
    assert all(c == RECOMPUTE for tags in first.values() for c in tags.values())
    prior = {k: s for k, s in working.items() if s}
    size = sum(prior.get((*key, RECOMPUTE), 0.0) for key in flat(first))
    return Additive.fit([(first, size)], made, prior)


@st.composite
def stacks(draw):
    """A chain of two tags with options of random prices, several layers deep."""
    layers = draw(st.integers(2, 5))
    return draw(priced(20, layers=layers, runs=layers, divisible=layers))


@st.composite
def priced(draw, size, **how):
    """A chain of two tags with options of random prices. `size`: the bytes of its input."""
    made, drawn = chain(**how), (draw(options(40)), draw(options(80)))
    tags = tuple(dataclasses.replace(t, options=o) for t, o in zip(made.tags, drawn))
    return profile(dataclasses.replace(made, values=(size, 40, 40, 80, 80), tags=tags))


@few
@given(st.data())
def test_the_best_division_is_that_of_brute_force(data):
    made = data.draw(stacks())
    rooms = st.integers(0, 130 * made.blocks[0].layers)
    room, host_room = data.draw(rooms), data.draw(rooms)
    got = best_division(ActionProblem(made, room, host_room, working_bytes(expected(made, {}))))
    splits = (divided(made, made.blocks[0], n) for n in range(1, made.blocks[0].layers))
    known = [p for split in splits for p in prices(split)]
    want = min((p.priced for p in known if p.bytes <= room and p.host <= host_room), default=None)
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    again = oracle(got.problem.profile, flat(got.solution.actions))
    assert again.saved == got.solution.bytes <= room
    assert again.host <= host_room
    assert again.priced == pytest.approx(want, rel=2e-3, abs=1e-3)  # recomputing breaks ties only


@few
@given(st.data())
def test_a_limit_of_seconds_leaves_the_best_division_or_none(data):
    made = data.draw(stacks())
    rooms = st.integers(0, 130 * made.blocks[0].layers)
    problem = ActionProblem(made, data.draw(rooms), data.draw(rooms))
    best = best_division(problem)
    assume(best is not None)
    seconds = best.solution.risk_adjusted_seconds
    same = best_division(problem, most_seconds=seconds)
    assert same.solution.risk_adjusted_seconds == pytest.approx(seconds, rel=2e-3, abs=1e-3)
    assert same.solution.bytes <= problem.room
    assert same.problem.most_seconds is None  # slower choices are named in the plan's table
    assert best_division(problem, most_seconds=0.99 * seconds - 0.01) is None


@few
@given(st.data())
def test_working_memory_is_that_of_the_last_group_or_of_the_first_alone(data):
    made = data.draw(stacks())
    model = expected(made, {("block", t, RECOMPUTE): 40 for t in ("u", "v")})
    working = working_bytes(model)  # in whole units
    size = {t: working.get(("block", t, RECOMPUTE), 0) for t in ("u", "v")}
    room = data.draw(st.integers(0, 170 * made.blocks[0].layers))
    two = best_division(ActionProblem(made, room, 10**6, working))
    if two is not None:
        chosen = [(b, two.solution.actions[b.name]) for b in two.problem.profile.blocks]
        first, last = (
            oracle(profile(b), {(b.name, t): c for t, c in tags.items()}) for b, tags in chosen
        )
        recomputed = lambda price: [t for (_, t), c in price.effective.items() if c == RECOMPUTE]
        extra = lambda price: sum(size[t] for t in recomputed(price))
        peaks = first.saved + last.saved + extra(last), first.saved + extra(first)
        assert two.solution.bytes == max(peaks) <= room
    one = solve(ActionProblem(made, room - sum(size.values()), 10**6, working))
    if one is not None:  # with room for the plan that is too careful
        assert two.solution.seconds <= one.seconds * (1 + 1e-3) + 1e-3


@few
@given(st.data())
def test_the_last_group_may_be_kept_whole_if_its_bytes_are_known(data):
    """Then no answer is slower, and one with a whole group takes what was said of its bytes."""
    made = data.draw(stacks())
    block = made.blocks[0]
    whole = data.draw(st.integers(40, 240))
    room = data.draw(st.integers(0, 200 * block.layers))
    without = best_division(ActionProblem(made, room, 10**6))
    stored = whole / block.everything_bytes
    either = best_division(ActionProblem(made, room, 10**6), stored)
    places = range(1, block.layers)
    fits = [at for at in places if whole * (block.layers - at) <= room]
    if without is not None:
        assert either.solution.seconds <= without.solution.seconds * (1 + 1e-9)
    if either is None:
        return
    last = list(either.solution.actions)[-1]
    if either.solution.actions[last].get(UNTAGGED) == KEEP:
        at = int(last.partition("[")[2].partition(":")[0])
        first = either.problem.profile.blocks[0]
        alone = {(first.name, t): c for t, c in either.solution.actions[first.name].items()}
        assert at in fits
        assert either.solution.bytes == oracle(profile(first), alone).saved + whole * (
            block.layers - at
        )
        assert either.solution.bytes <= room


def test_a_group_kept_whole_is_faster_than_every_tag_kept():
    """Untagged work is recomputed under every assignment of tags, but not without a checkpoint."""
    equations = [([0], [1], 1.0, None), ([1], [2], 0.0, "u"), ([2], [3], 5.0, None)]
    tags = {"u": [Option(KEEP, 8, 0, 0.0)]}
    made = profile(block(equations, [2, 3], [8] * 4, tags, layers=4, runs=4, divisible=4))
    tagged, either = (
        best_division(ActionProblem(made, 4 * 16, 0), stored) for stored in (None, 1.0)
    )
    assert either.solution.actions["block[1:4]"] == {UNTAGGED: KEEP}
    assert either.solution.seconds < tagged.solution.seconds


@st.composite
def twin_stacks(draw):
    """Two stacks in one step, the second under another label."""
    first, second = draw(stacks()).blocks[0], draw(stacks()).blocks[0]
    return profile(first, dataclasses.replace(second, name="decoder"))


@few
@given(st.data())
def test_each_of_two_stacks_may_be_divided(data):
    """Then no plan is slower than with the larger one divided alone, nor than with none."""
    made = data.draw(twin_stacks())
    most = sum(b.layers * 130 for b in made.blocks)
    problem = ActionProblem(made, data.draw(st.integers(0, most)), 10**6)
    both, none = best_division(problem), solve(problem)
    larger = divisible(made)[0]
    only = tuple(
        b if b.name == larger.name else dataclasses.replace(b, divisible=0) for b in made.blocks
    )
    one = best_division(dataclasses.replace(problem, profile=profile(*only)))
    assert (both is None) <= (one is None)
    for other in (one and one.solution, none):
        if other is not None:
            assert both.solution.seconds <= other.seconds * (1 + 2e-3) + 1e-3
    if both is not None:
        again = oracle(both.problem.profile, flat(both.solution.actions))
        assert again.saved == both.solution.bytes <= problem.room


@few
@given(st.data())
def test_what_two_divided_stacks_take_is_the_largest_peak(data):
    """While the layers of a group run backward, those that ran after it forward are gone, and its
    own working memory is there, with that of the other stack's last group.
    """
    made = data.draw(twin_stacks())
    working = {(b.name, t, RECOMPUTE): 40.0 for b in made.blocks for t in ("u", "v")}
    found = best_division(ActionProblem(made, data.draw(st.integers(0, 1500)), 10**6, working))
    if found is None:
        return
    actions = found.solution.actions
    alone = {
        b.name: oracle(profile(b), {(b.name, t): c for t, c in actions[b.name].items()})
        for b in found.problem.profile.blocks
    }
    extra = lambda label: 40 * sum(c == RECOMPUTE for c in alone[label].effective.values())
    everything = sum(price.saved for price in alone.values())
    groups = {b.name: [n for n in alone if n.partition("[")[0] == b.name] for b in made.blocks}
    lasts = {name: labels[-1] for name, labels in groups.items()}
    peaks = [everything + sum(map(extra, lasts.values()))]
    for name, labels in groups.items():
        if len(labels) == 2:
            others = sum(extra(last) for other, last in lasts.items() if other != name)
            peaks.append(everything - alone[labels[1]].saved + extra(labels[0]) + others)
    assert found.solution.bytes == max(peaks)
    assert found.solution.bytes <= found.problem.room


@st.composite
def spanned_stacks(draw):
    """Layers that run twice, and may run again in spans."""
    layers, again = draw(st.integers(2, 9)), draw(st.integers(0, 40)) / 10
    how = {"layers": layers, "runs": 2 * layers, "divisible": layers, "rerun_seconds": again}
    return draw(priced(draw(st.integers(0, 60)), **how))


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
    made = data.draw(spanned_stacks())
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
    made = data.draw(spanned_stacks())
    got = best_in_spans(ActionProblem(made), least_bytes)
    want = min((saved for saved, *_ in every(made)), default=None)
    assert (None if got is None else got[1].bytes) == want


@few
@given(st.data())
def test_the_price_in_spans_is_counted_by_hand(data):
    made = data.draw(spanned_stacks())
    if made.blocks[0].divisible < 3:
        return
    span = data.draw(st.integers(2, made.blocks[0].divisible - 1))
    spanned = in_spans(made, made.blocks, span)
    (label,) = (b.name for b in spanned.blocks)
    assert label == f"block[0:{made.blocks[0].divisible}:{span}]"
    for saved, host, seconds, assignment in by_hand(made, span):
        cost = evaluate(spanned, {label: nested(assignment, made)["block"]})
        assert (cost.saved_bytes, cost.host_bytes) == (saved, host)
        priced = cost.risk_adjusted_seconds + (PRICE - 1) * cost.recompute_seconds
        assert priced == pytest.approx(seconds)


@few
@given(st.data())
def test_blocks_that_take_turns_run_in_the_same_spans(data):
    """A span saves the inputs of the block that begins the iterations. A block may have several
    layers in an iteration.
    """
    (first,), layers = (made := data.draw(spanned_stacks())).blocks, data.draw(st.integers(1, 3))
    assume(first.divisible > 2)
    second = dataclasses.replace(
        first, name="other", loop="block", layers=layers * first.layers, runs=layers * first.runs
    )
    (loop,) = spannable(profile(first, second))
    span = data.draw(st.integers(2, first.divisible - 1))
    spanned = in_spans(profile(first, second), loop, span)
    labels = [f"{name}[0:{first.divisible}:{span}]" for name in ("block", "other")]
    assert [block.name for block in spanned.blocks] == labels
    inputs = first.divisible // span * first.values[first.inputs[0]]
    for saved, _, seconds, assignment in by_hand(made, span):
        tags = nested(assignment, made)["block"]
        cost = evaluate(spanned, dict.fromkeys(labels, tags))
        assert cost.saved_bytes == saved + layers * (saved - inputs)
        priced = cost.risk_adjusted_seconds + (PRICE - 1) * cost.recompute_seconds
        assert priced == pytest.approx((1 + layers) * seconds)


def test_a_loop_with_a_block_that_runs_in_no_spans_has_none():
    first, other = (chain(name=n, layers=6, runs=6, divisible=6) for n in ("block", "other"))
    able = dataclasses.replace(first, rerun_seconds=0.5)
    assert spannable(profile(able, other)) == [[able]]
    assert spannable(profile(able, dataclasses.replace(other, loop="block"))) == []


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
