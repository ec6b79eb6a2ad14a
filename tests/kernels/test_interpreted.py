"""Kernels without a GPU: Triton's interpreter gives the references' results bit for bit, and counts
what is moved.
"""

import pytest

from tests.shared import children
from tests.shared.marks import slow

pytest.importorskip("triton", reason="Triton's interpreter")
OPS = ("quantize", "quantize_offset", "quantize_by", "quantize_without")


@pytest.fixture(scope="module", params=["some", slow("every")])
def rows(request):
    return children.rows(children.with_cpus(1), "tests.kernels.interpreted", request.param)


@pytest.mark.parametrize("op", [*OPS, *(f"de{op}" for op in OPS)])
def test_a_kernel_is_its_reference_bit_for_bit(rows, op, request):
    name = op.replace("dequantize_without", "dequantize_with")
    found = [row for row in rows if row["case"].split()[0] == name]
    assert len(found) >= {"some": 3, "every": 7}[request.node.callspec.params["rows"]]
    assert [row["case"] for row in found if not row["equal"]] == []
    dtypes = "bfloat16", "float16", "float32"
    assert {dtype for dtype in dtypes for row in found if f" {dtype}" in row["case"]} == set(dtypes)


def test_kernels_move_each_byte_once(rows):
    moved = {row["case"].split()[-1]: row for row in rows if "moved" in row}
    assert len(moved) == 2 * len(OPS)
    for op in ("quantize", "dequantize"):
        assert moved[op]["least"] == pytest.approx(2.53, abs=0.01)
    once = lambda row: row["least"] <= row["moved"] <= 1.02 * row["least"]
    assert {op: row for op, row in moved.items() if not once(row)} == {}
