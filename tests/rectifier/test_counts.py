"""Numbers of outliers, what room they ask for, and what speaks for another plan."""

import dataclasses
import json

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem._core.actions import KEEP, Choice
from jaxmem._core.reader import Reader
from jaxmem._model.codecs.outlier import OutlierSeparated, z_scores
from jaxmem._train.rectifier.counts import Outliers, counted, greatest
from jaxmem._train.rectifier.decide import Room, overflows, rooms, rooms_of, without_room
from jaxmem._train.rectifier.track import outliers_of

# Few shapes, each of which is compiled: of one channel, of too few for an outlier, and of more.
SHAPES = st.tuples(st.sampled_from([1, 5]), st.sampled_from([1, 2, 10, 11, 60]))


@hypothesis.given(arrays.arrays(np.float64, SHAPES, elements=st.floats(-1e3, 1e3)))
def test_scores_are_numpys(x):
    z = np.asarray(z_scores(jnp.asarray(x)))
    sums = np.abs(x).sum(0)
    deviation = sums.std()
    if deviation > 1e-9 * max(sums.max(), 1e-300):
        np.testing.assert_allclose(z, (sums - sums.mean()) / deviation, rtol=1e-4, atol=1e-4)
        assert int((z > 3).sum()) <= (x.shape[-1] - 1) // 10  # Cantelli


@hypothesis.given(st.integers(0, 5000))
def test_room_is_enough_and_at_most_half_too_much(count):
    room = OutlierSeparated().with_room_for(count).capacity
    assert count <= room <= max(1.5 * count, count + 1)
    assert OutlierSeparated().with_room_for(room).capacity == room
    below = OutlierSeparated().with_room_for(max(0, count - 1)).capacity
    assert below <= room


def test_a_codec_keeps_its_other_fields():
    codec = OutlierSeparated(group=32, scale="float32", capacity=1, stochastic=True, seed=4)
    assert codec.with_room_for(5) == dataclasses.replace(codec, capacity=6)


def test_what_was_counted_is_read_back():
    scores = [
        np.array([[0.0, 4.0, 3.5], [0.0, 1.0, np.nan]], np.float32),
        np.array([9.0, 0.0, 0.0]),
    ]
    one = outliers_of(7, "block", "up", scores)
    assert one.counts == (2, 0, 1)
    assert one.places == ((1, 2), (), (0,))
    assert one.greatest[0] == 4.0
    assert one.greatest[2] == 9.0
    assert np.isnan(one.greatest[1])
    back = Reader().read(Outliers, json.loads(json.dumps(one.to_json(), allow_nan=False)))
    assert back == dataclasses.replace(one, greatest=back.greatest)
    np.testing.assert_equal(back.greatest, one.greatest)
    assert (one.most, one.rate, one.beyond(1)) == (2, pytest.approx(3 / 9), 1)


def test_counts_are_those_of_a_tags_tensors():
    of = lambda tag, counts: Outliers(1, "b", tag, 40, counts, (0.0,) * len(counts), ())
    found = counted([of("x", (1, 4)), of("y", (0,)), of("x", (2,))])
    assert found == {"b": {"x": [1, 4, 2], "y": [0]}}
    assert greatest([found, {"b": {"y": [3]}, "c": {"x": [1]}}]) == {
        "b": {"x": 4, "y": 3},
        "c": {"x": 1},
    }
    assert rooms({"b": {"x": 5}}) == {("b", "x"): 6}


def test_overflows_are_of_the_layers_that_a_plan_compresses():
    codec = lambda n: Choice("compress", f"outlier_separated(capacity={n})")
    grouped = Choice("compress", "grouped_symmetric()")
    actions = {
        "block[0:2]": {"x": codec(8), "y": KEEP, "z": grouped},
        "block[2:6]": {"x": codec(4), "w": codec(2)},
        "head": {"x": codec(1)},
    }
    assert rooms_of(actions) == [
        Room("block", "x", 8, 0, 2, 6),
        Room("block", "x", 4, 2, 6, 6),
        Room("block", "w", 2, 2, 6, 6),
        Room("head", "x", 1, 0, 1, 1),
    ]
    # Two microbatches of six layers; the first two layers have room for more.
    x = [8, 8, 4, 4, 4, 4, 8, 8, 4, 4, 5, 4]
    counts = {"block": {"x": x, "y": [30] * 12, "z": [30] * 12, "w": [9, 9, 2, 2, 2, 2] * 2}}
    assert overflows(actions, [counts]) == ["block/x has 5 outliers and room for 4"]
    assert without_room(actions, counts) == 1
    assert overflows(actions, [{"head": {"x": [1, 1]}}]) == []
    assert without_room(actions, {"head": {"x": [3, 2]}}) == 3
