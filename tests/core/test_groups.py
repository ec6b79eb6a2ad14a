"""Groups of layers: their labels, and profiles that are divided."""

import pytest

from jaxmem._core.groups import as_decided, divided, divisible, group_label, ranges, ungrouped
from tests.shared.profiles import chain, profile

pytestmark = pytest.mark.core


def test_labels():
    assert group_label("block", 0, 6) == "block[0:6]"
    assert ungrouped("block[0:6]") == ungrouped("block") == "block"
    assert ungrouped("a[b]") == "a[b]"
    labels = ["block[6:12]", "block", "other[0:1]", "block[0:6]"]
    assert ranges(labels, "block") == ((0, 6), (6, 12))


def test_a_divided_profile_is_the_same_step():
    made = profile(chain(layers=6, runs=12, divisible=6), chain(name="other"))
    split = divided(made, made.blocks[0], 2)
    assert [(b.name, b.layers, b.runs) for b in split.blocks] == [
        ("block[0:2]", 2, 4), ("block[2:6]", 4, 8), ("other", 1, 1)
    ]  # fmt: skip
    assert as_decided(made.blocks, ["block", "other"]) == made.blocks


def test_layers_that_microbatches_keep_alive_several_times_are_divided_by_their_number():
    """Three layers of the program, in a loop over two microbatches, recomputed once more."""
    made = profile(chain(layers=6, runs=12, divisible=3))
    split = divided(made, made.blocks[0], 1)
    assert [(b.name, b.layers, b.runs) for b in split.blocks] == [
        ("block[0:1]", 2, 4), ("block[1:3]", 4, 8)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1])
def test_only_layers_of_a_loop_are_divided(count):
    assert divisible(profile(chain(layers=4, divisible=count))) == []
    assert divisible(profile(chain(layers=4, divisible=4), chain(layers=2))) == [], (
        "two classes of one label"
    )
