"""Groups of layers: their labels, and profiles that are divided."""

import pytest

from jaxmem._core.groups import as_decided, divided, divisible, group_label, ranges, ungrouped
from tests.shared.profiles import chain, profile


def test_labels():
    assert group_label("block", 0, 6) == "block[0:6]"
    assert ungrouped("block[0:6]") == ungrouped("block") == "block"
    for label in ("a[b]", f"a[0:{'9' * 5000}]"):
        assert ungrouped(label) == label
    labels = ["block[6:12]", "block", "other[0:1]", "block[0:6]"]
    assert ranges(labels, "block") == ((0, 6), (6, 12))


def split(made, at):
    """Each block's name, layers and runs, with the first block divided."""
    return [(b.name, b.layers, b.runs) for b in divided(made, made.blocks[0], at).blocks]


def test_a_divided_profile_is_the_same_step():
    made = profile(chain(layers=6, runs=12, divisible=6), chain(name="other"))
    assert split(made, 2) == [("block[0:2]", 2, 4), ("block[2:6]", 4, 8), ("other", 1, 1)]
    assert as_decided(made.blocks, ["block", "other"]) == made.blocks


def test_layers_that_microbatches_keep_alive_several_times_are_divided_by_their_number():
    """Three layers of the program, in a loop over two microbatches, recomputed once more."""
    made = profile(chain(layers=6, runs=12, divisible=3))
    assert split(made, 1) == [("block[0:1]", 2, 4), ("block[1:3]", 4, 8)]


@pytest.mark.parametrize("count", [0, 1])
def test_only_layers_of_a_loop_are_divided(count):
    assert divisible(profile(chain(layers=4, divisible=count))) == []
    two_classes_of_one_label = profile(chain(layers=4, divisible=4), chain(layers=2))
    assert divisible(two_classes_of_one_label) == []
