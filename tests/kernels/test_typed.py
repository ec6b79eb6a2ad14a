"""Arrays whose types say how devices share them: each device runs an operation on its own part, and
the results are those of whole arrays.
"""

import pytest

from tests.shared import children

IN_PART = ("grouped_symmetric", "grouped_asymmetric", "channelwise_symmetric", "bit_mask")


@pytest.fixture(scope="module")
def rows():
    return children.rows(children.with_cpus(8), "tests.kernels.typed")


def test_parts_give_what_whole_arrays_give(rows):
    told = [row for row in rows if "equal" in row]
    assert len(told) == 6 * 5
    assert [row for row in told if not row["equal"]] == []
    # Where axes fit the groups in part alone, no row is divided.
    assert [r for r in told if r["parts"] != (4 if "in part" in r["case"] else 8)] == []


def test_tpus_run_kernels_on_what_they_share_however_it_is_divided(rows):
    found = {row["case"]: row["kernels"] for row in rows if "kernels" in row}
    in_part = {f"{name} in part": 2 for name in IN_PART}
    assert found == in_part | {"codes apart from scales": 1, "naive_per_token": 0, "float64": 0}
