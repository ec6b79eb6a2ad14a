"""Kernels compile for TPUs that are not there, inside of what steps are made of, and the codes that
they write are not padded.
"""

import pytest

from jaxmem._target.deviceless.process import child_environment
from tests.shared import children

pytest.importorskip("libtpu", reason="XLA's compiler for TPUs")
CODECS = 6


def rows(*names: str) -> list[dict]:
    environment = child_environment(children.finding_packages())
    return children.rows(environment, "tests.kernels.tpu_compiled", *names)


@pytest.fixture(scope="module")
def one():
    return {row["case"]: row for row in rows("v5e")}


def test_every_codec_is_a_kernel_each_way(one):
    found = [row for row in one.values() if "share" in row and "bytes of" not in row["case"]]
    assert len(found) == CODECS
    assert [row for row in found if row["kernels"] != 2] == []


def lie_as_their_codec_says(rows: list[dict]) -> None:
    # Of heads, scales and single channels have few rows to fill a tile with.
    most = lambda row: 1.11 if "64]" in row["case"] else 1.03
    assert [row for row in rows if not 1 <= row["share"] < most(row)] == []
    alone = [row for row in rows if "bytes of" in row["case"]]
    assert [row for row in alone if row["kernels"] != 1] == []


def test_codes_lie_in_memory_as_their_codec_says(one):
    """Of every codec, beside what was decoded; of heads and of more columns, alone."""
    found = [row for row in one.values() if "share" in row]
    assert len(found) == CODECS + 4
    lie_as_their_codec_says(found)


@pytest.mark.slow
def test_codes_of_every_shape_lie_in_memory_as_their_codec_says():
    found = rows("codes", "v5e")
    assert len(found) == 3 * (CODECS - 1) - 1
    lie_as_their_codec_says(found)


def test_tensors_are_read_no_more_often_than_channels_ask_for(one):
    found = {case: row["readings"] for case, row in one.items() if "readings" in row}
    # A program holds all that a channel has. Which channels are outliers is known after the last.
    by = {"channelwise_symmetric": 1, "outlier_separated": 2}
    shapes = "[4096, 1024]", "[2, 1024, 2304]"
    assert found == {f"readings by {name} of {s}": n for name, n in by.items() for s in shapes}


@pytest.mark.parametrize(
    "case",
    ["scan", "vmap", "checkpoint", "shard_map", "shard_map, unchecked", "divided by shard_map"],
)
def test_inside_of_transformations_it_is_a_kernel(one, case):
    assert one[case]["kernels"] == 1


@pytest.mark.parametrize(
    "case",
    ["references", "few values", "few tokens", "float16", "flat", "a short last group", "divided"],
)
def test_everything_else_is_the_reference(one, case):
    assert one[case]["kernels"] == 0


def test_tensors_that_types_divide_are_encoded_where_they_lie(one):
    found = {case: row for case, row in one.items() if case.startswith("typed ")}
    assert len(found) == 9
    assert [row for row in found.values() if row["kernels"] != 2] == []
    alone = [row for case, row in found.items() if "symmetric" in case and "grouped" in case]
    assert len(alone) == 4
    assert [row for row in alone if row["collectives"]] == []
    # Scales, sums and exact values of channels, of which a device's part holds many.
    most = lambda row: max(row["collectives"], default=0)
    assert [row for row in found.values() if most(row) > row["shard"] / 30] == []
    assert any(map(most, found.values())), "the test sees a reduction"


def test_what_types_divide_is_exported_with_kernels(one):
    assert one["typed, exported"]["kernels"] == 1
    assert one["typed, a part that no kernel takes"]["kernels"] == 0


@pytest.mark.slow
def test_every_tpu_that_pallas_knows():
    found = rows("v4", "v5e", "v5p", "v6e", "tpu7x")
    assert len(found) == 5 * 20
    assert [row for row in found if row["kernels"] != 2] == []
