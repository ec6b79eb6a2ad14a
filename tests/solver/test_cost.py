"""The price of an assignment against an oracle that shares no code with it, and by hand."""

import dataclasses

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, UNTAGGED, Choice
from jaxmem._core.profile import Option
from jaxmem._planner.solve.cost import effective, evaluate, everything
from jaxmem._planner.solve.waste import gaps, warnings, wasted
from jaxmem.errors import SolverError, TagError
from tests.shared import profiles
from tests.shared.profiles import INT4, INT8, block, chain, flat, nested, oracle, profile

INT4_OFFLOAD = Choice("compress_offload", "int4")
few = hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)

DOUBTS = st.tuples(st.sampled_from((0.0, 0.1, 2.0)), st.sampled_from((0.0, 0.3, 5.0)))


@few
@given(st.data())
def test_evaluate_is_the_oracle(data):
    made = data.draw(profiles.profiles())
    choices = profiles.open_to(made)
    picked = {k: data.draw(st.sampled_from(c)) for k, c in choices.items()}
    made = profiles.doubted(made, *data.draw(DOUBTS))
    cost, expected = evaluate(made, nested(picked, made)), oracle(made, picked)
    assert (cost.saved_bytes, cost.host_bytes) == (expected.saved, expected.host)
    assert cost.seconds == pytest.approx(expected.seconds, rel=1e-12, abs=1e-12)
    assert cost.recompute_seconds == pytest.approx(expected.recompute, rel=1e-12, abs=1e-12)
    assert cost.doubt_seconds == pytest.approx(expected.doubt, rel=1e-12, abs=1e-12)
    assert cost.risk_adjusted_seconds == pytest.approx(cost.seconds + expected.doubt)
    assert flat(effective(made, nested(picked, made))) == expected.effective


def test_the_copies_of_every_action_that_offloads_are_host_seconds():
    made = profile(
        block(
            [([0], [1], 1.0, None), ([1], [2], 0.0, "u"), ([2], [3], 0.0, "v")],
            [2, 3], [5, 10, 10, 10],
            {
                "u": [Option(KEEP, 10, 0, 0.1), profiles.copied(INT4_OFFLOAD, 4, 0.25, 2.0)],
                "v": [Option(KEEP, 10, 0, 0.1), profiles.copied(OFFLOAD, 10, 0.5)],
            },
            runs=3, forward_seconds=10.0, backward_seconds=13.0,
        )
    )  # fmt: skip
    host = lambda u, v: evaluate(made, {"block": {"u": u, "v": v}}).host_seconds
    assert host(KEEP, KEEP) == 0.0
    assert host(KEEP, OFFLOAD) == pytest.approx(3 * 0.5)
    assert host(INT4_OFFLOAD, KEEP) == pytest.approx(3 * 0.25), "encoding is no copy"
    coded = evaluate(made, {"block": {"u": INT4_OFFLOAD, "v": KEEP}})
    assert coded.codec_seconds == pytest.approx(3 * 2.0), "and a copy is no encoding"
    exposed = 14 - 10 + 14 - 13  # seconds of 14 bytes each way that other work does not hide
    assert host(INT4_OFFLOAD, OFFLOAD) == pytest.approx(3 * (0.25 + 0.5 + exposed))


def test_each_place_of_a_name_has_its_own_seconds_of_codecs():
    first, second = ([Option(KEEP, 10, 0, 0.1), Option(INT4, 3, 0, s)] for s in (0.4, 0.7))
    made = profile(
        block(
            [([0], [1], 1.0, None), ([1], [2], 0.0, "u"), ([2], [3], 0.0, "u")],
            [2, 3], [5, 10, 10, 10], [("u", first), ("u", second)], runs=2,
        )
    )  # fmt: skip
    assert evaluate(made, {"block": {"u": INT4}}).codec_seconds == pytest.approx(2 * 1.1)
    assert evaluate(made, {"block": {"u": KEEP}}).codec_seconds == 0.0


def test_everything_keeps_what_the_backward_needs_at_the_price_of_keeping():
    made = profile(chain(layers=2, runs=2))
    cost = everything(made)
    assert cost.saved_bytes == 2 * 30
    assert cost.seconds == pytest.approx(2 * 0.3)
    assert evaluate(made, {"block": {UNTAGGED: KEEP}}) == cost
    assert effective(made, {"block": {"u": KEEP, UNTAGGED: KEEP}}) == {"block": {UNTAGGED: KEEP}}


def between_tags(keeping, normalizing, second_product=0):
    """x -> "a" -> product (4 s) -> norm -> "b"; the backward reads the square of what the norm
    reads, "a" and "b". There may be a second product between norm and "b".
    """
    made = block(
        [([0], [1], 0.0, "a"), ([1], [2], 4.0, None), ([2], [3], 0.1, None),
         ([2], [4], normalizing, None), ([4], [5], 0.0, "b")], [1, 3, 5], [9] * 6,
        {"a": [Option(KEEP, 9, 0, 0.1)], "b": [Option(KEEP, 9, 0, keeping)]},
    )  # fmt: skip
    products = {1: 1, 3: second_product}
    equations = [
        dataclasses.replace(e, matmuls=products.get(i, 0)) for i, e in enumerate(made.equations)
    ]
    return profile(dataclasses.replace(made, equations=tuple(equations)))


@pytest.mark.parametrize(
    ("keeping", "normalizing", "second_product", "in_vain"),
    [(5, 4.5, 0, True), (0.5, 3.5, 0, True), (0.5, 4.5, 0, False), (5, 3.5, 1, False)],
    ids=["less than keeping takes", "less than half of making", "more than both", "a product"],
)
def test_a_saved_tag_is_wasted_only_if_it_spares_nothing(
    keeping, normalizing, second_product, in_vain
):
    made, kept = between_tags(keeping, normalizing, second_product), {"a": KEEP, "b": KEEP}
    with_it, without = (evaluate(made, {"block": c}) for c in (kept, kept | {"b": RECOMPUTE}))
    spared = [
        getattr(without.blocks[0], what) - getattr(with_it.blocks[0], what)
        for what in ("matmuls", "recompute_seconds")
    ]
    assert spared == [second_product, pytest.approx(normalizing)]
    assert wasted(made, {"block": kept}) == ((("block", "b"),) if in_vain else ())
    assert gaps(made, {"block": kept}) == {("block", "b"): 1}
    assert not warnings(profile(chain()), {"block": {"u": KEEP, "v": KEEP}})
    (message,) = warnings(made, {"block": kept})
    assert ("recomputed all the same" in message) is in_vain
    assert ("1 matrix product before tag 'b'" in message) is not in_vain
    # Of a layer that `jaxmem.auto` found, nobody can move a tag.
    (own,) = made.blocks
    for label in ("auto", "auto_12"):
        found = dataclasses.replace(made, blocks=(dataclasses.replace(own, name=label),))
        assert wasted(found, {label: kept}) == (((label, "b"),) if in_vain else ())
        assert warnings(found, {label: kept}) == ()


def test_a_tag_that_stands_for_another_is_not_wasted():
    made = profile(
        block(
            [([0], [1], 1.0, None), ([1], [2], 0.0, "u"), ([2], [3], 0.1, None),
             ([3], [4], 0.0, "v")], [4], [5, 9, 9, 9, 9],
            {name: [Option(KEEP, 9, 0, 0.5)] for name in "uv"},
        )
    )  # fmt: skip
    assert wasted(made, {"block": {"u": KEEP, "v": KEEP}}) == ()


def test_a_label_wastes_a_tag_only_if_each_of_its_classes_does():
    useful = between_tags(0.5, 0.4, 1).blocks[0]
    made = dataclasses.replace(
        between_tags(0.5, 0.4), blocks=(useful, *between_tags(0.5, 0.4).blocks)
    )
    assert wasted(made, {"block": {"a": KEEP, "b": KEEP}}) == ()


def test_names_and_choices_that_the_profile_lacks():
    made = profile(chain())
    with pytest.raises(TagError, match=r"names tags \['w'\] of block 'block'; it has \['u', 'v'\]"):
        evaluate(made, {"block": {"w": KEEP}})
    with pytest.raises(TagError, match="names block 'blok'"):
        evaluate(made, {"blok": {}})
    with pytest.raises(TagError, match="`compress int8` has no price; .*: keep, compress int4"):
        evaluate(made, {"block": {"v": INT8}})
    with pytest.raises(SolverError, match="value 2 is demanded, and no equation makes it"):
        evaluate(profile(dataclasses.replace(chain(), equations=())), {})
