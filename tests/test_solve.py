"""The planner's program against brute force over every assignment, its closed form, and Adacc's own formulation."""

import dataclasses
import itertools
import math
import statistics

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._errors import SolverError, TagError
from jaxmem._evaluate import effective, evaluate, everything
from jaxmem._greedy import greedy
from jaxmem._solve import least_bytes, runner_up, solve
from jaxmem._types import KEEP, OFFLOAD, RECOMPUTE, REST, Choice, Option
from tests import profiles
from tests.profiles import INT4, INT8, block, oracle, prices, profile

pytestmark = pytest.mark.core
few = hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
MB = 1_000_000


def flat(actions):
    return {(b, t): c for b, tags in actions.items() for t, c in tags.items()}


def nested(assignment, made):
    result = {b.name: {} for b in made.blocks}
    for (label, tag), choice in assignment.items():
        result[label][tag] = choice
    return result


def best(options, room, host_room=None, key=lambda p: p.priced):
    fitting = [p for p in options if p.bytes <= room and (host_room is None or p.host <= host_room)]
    return min(fitting, key=key, default=None)


def tolerance(made):
    """Seconds by which ties are broken in favour of fewer bytes: a millionth of everything, once."""
    return 2e-6 * max(1.0, max(p.priced for p in prices(made)))


@few
@given(st.data())
def test_evaluate_is_the_oracle(data):
    made = data.draw(profiles.profiles())
    choices = profiles.open_to(made)
    picked = {k: data.draw(st.sampled_from(c)) for k, c in choices.items()}
    cost, expected = evaluate(made, nested(picked, made)), oracle(made, picked)
    assert (cost.saved_bytes, cost.host_bytes) == (expected.saved, expected.host)
    assert cost.seconds == pytest.approx(expected.seconds, rel=1e-12, abs=1e-12)
    assert cost.recompute_seconds == pytest.approx(expected.recompute, rel=1e-12, abs=1e-12)
    assert flat(effective(made, nested(picked, made))) == expected.effective


@few
@given(st.data())
def test_solve_is_the_optimum_of_all_assignments(data):
    made = data.draw(profiles.profiles())
    transients = data.draw(profiles.transients_of(made))
    known = prices(made, transients)
    room = data.draw(st.sampled_from(sorted({p.bytes for p in known}))) - data.draw(st.sampled_from((0, 0, 1)))
    host_room = data.draw(st.sampled_from((None, *sorted({p.host for p in known}))))
    got = solve(made, room=room, transients=transients, host_room=host_room)
    want = best(known, room, host_room)
    assert (got is None) == (want is None)
    if got is None:
        return
    again = oracle(made, flat(got.actions), transients)
    assert flat(got.actions) == again.effective
    assert (got.bytes, got.host_bytes, got.saved_bytes) == (again.bytes, again.host, again.saved)
    assert got.bytes <= room
    assert host_room is None or got.host_bytes <= host_room
    assert got.seconds == pytest.approx(again.seconds, rel=1e-12, abs=1e-12)
    assert again.priced <= want.priced * (1 + 1e-6) + tolerance(made)
    assert got.gap == 0


@few
@given(st.data())
def test_more_room_never_costs_time_and_greedy_is_never_better(data):
    made = data.draw(profiles.profiles())
    known = prices(made)
    rooms = sorted(data.draw(st.lists(st.sampled_from([p.bytes for p in known]), min_size=2, max_size=4)))
    slack, last = tolerance(made), math.inf
    for room in rooms:
        got, baseline = solve(made, room=room), greedy(made, room=room)
        assert got is not None
        price = oracle(made, flat(got.actions)).priced
        assert price <= last * (1 + 1e-6) + slack
        last = price
        if baseline is not None:
            assert baseline.bytes <= room
            assert price <= oracle(made, flat(baseline.actions)).priced * (1 + 1e-6) + slack


@few
@given(st.data())
def test_least_bytes_is_the_least_of_all_assignments(data):
    made = data.draw(profiles.profiles())
    transients = data.draw(profiles.transients_of(made))
    known = prices(made, transients)
    got = least_bytes(made, transients)
    least = min(p.bytes for p in known)
    assert got.bytes == least
    want = best(known, least)
    assert oracle(made, flat(got.actions)).priced <= want.priced * (1 + 1e-6) + tolerance(made)


@few
@given(st.data())
def test_runner_up_is_the_optimum_without_the_choice(data):
    made = data.draw(profiles.profiles())
    choices = profiles.open_to(made)
    hypothesis.assume(choices)
    known = prices(made)
    room = data.draw(st.sampled_from([p.bytes for p in known]))
    got = solve(made, room=room)
    key = data.draw(st.sampled_from(list(choices)))
    chosen = got.actions[key[0]][key[1]]
    others = [p for p in known if p.effective[key] != chosen]
    want = best(others, room)
    found = runner_up(made, got, *key, room=room)
    if found is None and want is not None:  # nothing demands the tag: no other choice alone would do anything
        changed = {oracle(made, flat(got.actions) | {key: c}).effective[key] for c in choices[key]}
        assert changed == {RECOMPUTE}
        return
    assert (found is None) == (want is None)
    if found is not None:
        choice, extra = found
        assert choice != chosen
        least = oracle(made, flat(got.actions)).seconds
        assert extra <= max(0.0, want.priced - least) * (1 + 1e-6) + tolerance(made)


def chain(**other):
    """x -> a (1 s) -> tag "u" -> b (2 s, twice the bytes) -> tag "v"; the backward reads "v" and "u"."""
    tags = {"u": [Option(KEEP, 10, 0, 0.1), Option(INT4, 3, 0, 0.4), Option(OFFLOAD, 0, 10, 0.2)]}
    tags["v"] = [Option(KEEP, 20, 0, 0.2), Option(INT4, 6, 0, 0.8)]
    equations = [([0], [1], 1.0, None), ([1], [2], 0.0, "u"), ([2], [3], 2.0, None), ([3], [4], 0.0, "v")]
    return block(equations, [2, 4], [5, 10, 10, 20, 20], tags, **other)


@pytest.mark.parametrize(
    ("u", "v", "device", "host", "seconds"),
    [
        (KEEP, KEEP, 30, 0, 0.3),
        (RECOMPUTE, KEEP, 25, 0, 1.2),  # the block's input instead
        (KEEP, RECOMPUTE, 10, 0, 2.1),
        (RECOMPUTE, RECOMPUTE, 5, 0, 3.0),
        (INT4, INT4, 9, 0, 1.2),
        (OFFLOAD, KEEP, 20, 10, 0.4 + 10 - 4 + 10 - 6),
        (OFFLOAD, RECOMPUTE, 0, 10, 2.2 + 10 - 4 + 10 - 6 - 2),  # what is recomputed hides the transfer
    ],
)
def test_evaluate_by_hand(u, v, device, host, seconds):
    made = profile(chain(layers=3, runs=6, forward_seconds=4.0, backward_seconds=6.0))
    cost = evaluate(made, {"block": {"u": u, "v": v}})
    assert (cost.saved_bytes, cost.host_bytes) == (3 * device, 3 * host)
    assert cost.seconds == pytest.approx(6 * seconds)


def test_everything_keeps_what_the_backward_needs_at_the_price_of_keeping():
    made = profile(chain(layers=2, runs=2))
    cost = everything(made)
    assert cost.saved_bytes == 2 * 30
    assert cost.seconds == pytest.approx(2 * 0.3)
    assert evaluate(made, {"block": {REST: KEEP}}) == cost
    assert effective(made, {"block": {"u": KEEP, REST: KEEP}}) == {"block": {REST: KEEP}}


def test_a_tag_that_nothing_demands_is_not_saved():
    made = profile(dataclasses.replace(chain(), needed=(4,)))
    cost = evaluate(made, {"block": {"u": KEEP, "v": KEEP}})
    assert cost.saved_bytes == 20
    assert cost.blocks[0].saved == (("v", KEEP),)
    assert effective(made, {"block": {"u": KEEP, "v": KEEP}}) == {"block": {"u": RECOMPUTE, "v": KEEP}}


def test_a_tag_after_an_operation_that_is_recomputed_all_the_same_is_told():
    softmax = block(
        [([0], [1], 5.0, None), ([1], [2], 1.0, None), ([2], [3], 0.0, "probs")], [2, 3], [1, 9, 9, 9],
        {"probs": [Option(KEEP, 9, 0, 0.1)]},
    )  # fmt: skip
    cost = evaluate(profile(softmax), {"block": {"probs": KEEP}})
    assert cost.blocks[0].recomputed == (0, 1)
    assert cost.blocks[0].wasted == ("probs",)
    assert "'probs' of block 'block' is saved" in cost.warnings[0]
    assert solve(profile(softmax), room=100).actions == {"block": {"probs": RECOMPUTE}}
    assert not evaluate(profile(chain()), {"block": {"u": KEEP, "v": KEEP}}).warnings


def test_classes_of_one_label_share_their_choices_and_need_a_price_in_each():
    cheap, dear = chain(), chain(layers=4, runs=4)
    tags = dict(u=dear.tags[0], v=dataclasses.replace(dear.tags[1], options=(Option(KEEP, 20, 0, 0.2), Option(INT8, 11, 0, 0.1))))
    made = profile(cheap, dataclasses.replace(dear, tags=tuple(tags.values())))
    solution = solve(made, room=5 * 25)
    assert solution.actions["block"]["v"] in (KEEP, RECOMPUTE)  # int4 and int8 are each missing in one class
    assert solution.saved_bytes <= 5 * 25
    with pytest.raises(TagError, match="choice `compress int8` has no price"):
        evaluate(made, {"block": {"v": INT8}})


def test_host_room_limits_what_is_offloaded():
    made = profile(chain(), link=1e9)
    assert solve(made, room=20).actions["block"]["u"] == OFFLOAD
    assert solve(made, room=20, host_room=9).host_bytes == 0


def test_ties_take_fewer_bytes():
    equal = Option(KEEP, 20, 0, 0.5), Option(INT4, 6, 0, 0.5)
    made = profile(block([([0], [1], 3.0, None), ([1], [2], 0.0, "u")], [2], [5, 20, 20], {"u": equal}))
    assert solve(made, room=None).actions == {"block": {"u": INT4}}


def test_recomputation_is_not_taken_to_hide_a_transfer():
    tags = {"u": [Option(KEEP, 50, 0, 0.0), Option(OFFLOAD, 0, 50, 0.0)], "v": [Option(KEEP, 1, 0, 0.0)]}
    equations = [([0], [1], 1e3, None), ([1], [2], 0.0, "u"), ([2], [3], 10.0, None), ([3], [4], 0.0, "v")]
    made = profile(block(equations, [2, 4], [0, 50, 50, 1, 1], tags, forward_seconds=50.0))
    solution = solve(made, room=1)
    assert solution.actions == {"block": {"u": OFFLOAD, "v": KEEP}}
    assert solution.seconds == pytest.approx(evaluate(made, {"block": {"u": OFFLOAD}}).seconds)


def test_refused_choices_and_assignments_are_not_returned():
    made, seen = profile(chain()), []
    while (found := solve(made, room=25, exclude=seen)) is not None:
        assert found.actions not in seen
        seen.append(found.actions)
    fitting = {tuple(p.effective.items()) for p in prices(made) if p.bytes <= 25}
    assert len(seen) == len(fitting) > 3
    assert [oracle(made, flat(a)).priced for a in seen] == sorted(oracle(made, flat(a)).priced for a in seen)
    lossless = solve(made, room=10, allowed=lambda block, tag, choice: not choice.action.compresses)
    assert all(not c.action.compresses for c in lossless.actions["block"].values())
    assert solve(made, room=25, allowed=lambda *_: False) is None


@pytest.mark.parametrize("room", [0, 5, None])
def test_a_step_without_choices(room):
    made = profile(block([([0], [1], 1.0, None)], [1], [5, 5]))
    solution = solve(made, room=room)
    assert (solution is None) == (room == 0)
    assert solution is None or (solution.actions == {"block": {}} and solution.saved_bytes == 5)
    assert solve(profile(), room=room).seconds == 0


def broken(field, value):
    b = chain()
    if field == "equation":
        return dataclasses.replace(b, equations=(dataclasses.replace(b.equations[0], seconds=value), *b.equations[1:]))
    if field == "option":
        worse = dataclasses.replace(b.tags[0].options[1], seconds=value)
        return dataclasses.replace(b, tags=(dataclasses.replace(b.tags[0], options=(worse,)), b.tags[1]))
    return dataclasses.replace(b, **{field: value})


@pytest.mark.parametrize("find", [solve, greedy])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("equation", math.nan, r"seconds of equation 0 \(op\) of block 'block' is nan; expected a finite number"),
        ("equation", -1.0, "seconds of equation 0"),
        ("option", math.inf, r"`seconds` of option `compress int4` of tag 'u' of block 'block' is inf"),
        ("values", (5, -10, 10, 20, 20), "bytes of value 1 of block 'block' is -10"),
        ("forward_seconds", math.nan, "`forward_seconds` of block 'block' is nan"),
        ("needed", (2, 9), "needs value 9, which no equation makes"),
        ("inputs", (), r"equation 0 \(op\) of block 'block' reads value 0, which nothing before it makes"),
        ("input_seconds", (1.0, 2.0), "has 2 entries for 1 inputs"),
        ("input_seconds", (-1.0,), "`input_seconds` of block 'block' is -1.0"),
    ],
)
def test_numbers_that_cannot_be_used_are_named(find, field, value, message):
    with pytest.raises(SolverError, match=message):
        find(profile(broken(field, value)), room=100)


def test_limits_that_cannot_be_used_are_named():
    with pytest.raises(SolverError, match="`room` is nan"):
        solve(profile(chain()), room=math.nan)
    with pytest.raises(SolverError, match="`transients` of"):
        solve(profile(chain()), room=9, transients={("block", "u", KEEP): math.inf})
    with pytest.raises(SolverError, match="`link_bytes_per_second` is 0"):
        solve(profile(chain(), link=0.0), room=9)
    with pytest.raises(TagError, match=r"names tags \['w'\] of block 'block'; it has \['u', 'v'\]"):
        evaluate(profile(chain()), {"block": {"w": KEEP}})
    with pytest.raises(TagError, match="names block 'blok'"):
        evaluate(profile(chain()), {"blok": {}})
    with pytest.raises(TagError, match="`tag` 'w'"):
        runner_up(profile(chain()), solve(profile(chain()), room=99), "block", "w", room=99)


def deep(tags=10, depth=14):
    """A block of `tags` tags with eight options each, and `tags * depth` equations with skips between them."""
    equations, sizes, named = [], [4 * MB], {}
    for t in range(tags):
        for d in range(depth):
            new = len(sizes)
            operands = {max(0, new - 1), max(0, new - 2 - (3 * t + 5 * d) % 7)}
            equations.append((operands, (new,), 1e-5 * (1 + (7 * t + 3 * d) % 11), None))
            sizes.append((1 + (5 * t + d) % 13) * MB)
        size = sizes[-1]
        codecs = [(Choice(a, f"c{k}"), size // (k + 1), 1e-5 * (k + t % 3)) for k in (1, 2, 3) for a in ("compress",)]
        named[f"t{t}"] = [Option(KEEP, size, 0, size / 2e12), Option(OFFLOAD, 0, size, size / 1e12)]
        named[f"t{t}"] += [Option(c, n, 0, s) for c, n, s in codecs]
        named[f"t{t}"] += [Option(Choice("compress_offload", c.codec), 0, n, 1.5 * s) for c, n, s in codecs]
        equations.append(((len(sizes) - 1,), (len(sizes),), 0.0, f"t{t}"))
        sizes.append(size)
    return block(equations, range(0, len(sizes), 9), sizes, named, layers=24, runs=24, forward_seconds=2e-3, backward_seconds=4e-3)


def test_a_block_of_ten_tags_is_solved_in_under_half_a_second():
    """Adacc §3.3: "less than 0.5 second"."""
    made = profile(deep(), link=55e9)
    least, most = least_bytes(made), solve(made, room=None)
    rooms = [least.bytes + (most.bytes - least.bytes) * k // 8 for k in range(1, 8)]
    solutions = [solve(made, room=room) for room in rooms]
    assert all(s.bytes <= room for s, room in zip(solutions, rooms))
    assert [s.seconds for s in solutions] == sorted((s.seconds for s in solutions), reverse=True)
    assert statistics.median(s.solve_seconds for s in solutions) < 0.5


# Adacc Table 1: size MB, recompute ms, compress and decompress ms, compressed MB
TABLE_1 = {"T1": (96, 0.36, 0.37, 24), "T2": (42, 1.02, 0.16, 11.8), "T3": (42, 0.58, 0.16, 11.8), "T4": (10.5, 0.04, 0.04, 2.6)}
OP_1 = {"T0": (42, math.inf, 0.16, 11.8)}


def table_1(compress_input: bool):
    """Each tensor made from the block's input, which the backward reads too; keeping is free, as in eq. 4."""
    equations, sizes, named = [([0], [1], 0.0, "T0")], [42 * MB, 42 * MB], {"T0": [Option(KEEP, 42 * MB, 0, 0.0)]}
    if compress_input:
        named["T0"].append(Option(INT4, int(11.8 * MB), 0, 0.16e-3))
    for name, (size, recompute, compress, small) in TABLE_1.items():
        raw = len(sizes)
        sizes += [int(size * MB)] * 2
        equations += [([1], [raw], recompute * 1e-3, None), ([raw], [raw + 1], 0.0, name)]
        named[name] = [Option(KEEP, int(size * MB), 0, 0.0), Option(INT4, int(small * MB), 0, compress * 1e-3)]
    return profile(block(equations, [1, *range(3, len(sizes), 2)], sizes, named))


def eq_4_to_8(room_mb: float) -> float | None:
    """Least milliseconds over all R (0 recompute, 1 compress, 2 retain), R of the first operator never 0."""
    tensors = [*OP_1.values(), *TABLE_1.values()]
    feasible = [
        sum((recompute, compress, 0.0)[r] for r, (_, recompute, compress, _) in zip(rs, tensors))
        for rs in itertools.product((0, 1, 2), repeat=len(tensors))
        if rs[0] != 0 and sum((0, small, size)[r] for r, (size, _, _, small) in zip(rs, tensors)) <= room_mb
    ]
    return min(feasible, default=None)


def test_adacc_table_1():
    solution = solve(table_1(compress_input=False), room=(25 + 42) * MB)
    choices = solution.actions["block"]
    assert [choices[t] for t in TABLE_1] == [RECOMPUTE, INT4, INT4, RECOMPUTE]
    assert solution.seconds == pytest.approx((0.36 + 0.16 + 0.16 + 0.04) * 1e-3)


def test_adacc_equations_4_to_8_at_every_budget():
    made = table_1(compress_input=True)
    for room_mb in range(0, 240, 4):
        solution, want = solve(made, room=room_mb * MB), eq_4_to_8(room_mb)
        assert (solution is None) == (want is None)
        assert solution is None or solution.seconds == pytest.approx(want * 1e-3, rel=1e-6, abs=1e-12)
