"""A tensor that eight GPUs share is encoded where it lies: each device runs the kernels on its
part, and nothing is gathered.
"""

import pytest

from tests.shared import children

pytest.importorskip("jax_triton", reason="kernels")
pytest.importorskip("jax_cuda13_plugin", reason="XLA:GPU's compiler")


def compiled(*which: str) -> list[dict]:
    environment = children.finding_packages() | {"JAX_PLATFORMS": "cpu"}
    return children.rows(environment, "tests.kernels.partitioned", *which)


@pytest.fixture(
    scope="module",
    params=["", pytest.param("every", marks=pytest.mark.slow)],
    ids=["some", "every"],
)
def rows(request):
    """Every codec over an axis of the batch and one of the width, the first over all axes; or every
    codec over all.
    """
    found = compiled(*request.param.split())
    assert len(found) == (5 * 4 if request.param else 5 + 3)
    return found


@pytest.mark.slow
def test_what_does_not_fit_is_compiled_too():
    assert len(compiled("awkward")) == 5 * 4


def test_every_device_runs_kernels_on_its_part(rows):
    wanted = {row["codec"]: 0 if row["codec"] == "bit_mask" else 2 for row in rows}
    assert len(wanted) == 5
    assert [row for row in rows if row["kernels"] != wanted[row["codec"]]] == []


def test_nothing_of_the_tensor_s_size_moves_between_devices(rows):
    alone = ("grouped_symmetric", "grouped_asymmetric", "bit_mask")
    assert [row for row in rows if row["codec"] in alone and row["collectives"]] == []
    # sums, scales and exact values of channels: of a few channels a small part of a device's share
    assert [row for row in rows if max(row["collectives"], default=0) > row["shard"] / 30] == []
    assert any(row["collectives"] for row in rows), (
        "scales of channels over a divided batch need a reduction: the test sees it"
    )
