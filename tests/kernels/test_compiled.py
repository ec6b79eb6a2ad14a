"""Kernels compile for GPUs that are not there: no spills, 16 bytes to each load and store that
moves a tensor.
"""

import json

import pytest

from tests.shared import children

pytest.importorskip("jax_triton", reason="Triton's compiler")
KERNELS = 9


def rows(folder, *capabilities: int) -> list[dict]:
    environment = children.finding_packages() | {"JAX_PLATFORMS": "cpu"}
    line = "-m", "tests.kernels.compiled", folder, *capabilities
    done = children.python(*line, environment=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict], count: int) -> None:
    assert len(rows) == count
    assert {row["case"]: row["spilled"] for row in rows if row["spilled"] or row["local"]} == {}
    for row in rows:
        assert 16 in row["loads"], row["case"]
        assert 16 in row["stores"], row["case"]
        assert sum(n for n in row["stores"] if n < 16) <= 8, (
            f"{row['case']}: more than scales and offsets in small stores"
        )
        if row["kernel"] not in (
            "encode flat",
            "decode_with",
        ):  # a flat tensor's last values, and single channels' own
            assert sum(n for n in row["loads"] if n < 16) <= 40, row["case"]


def test_for_hopper(tmp_path):
    check(rows(tmp_path, 90), KERNELS)


@pytest.mark.slow
def test_for_every_gpu_of_the_table(tmp_path):
    check(rows(tmp_path, 75, 80, 86, 89, 90, 100), 6 * 2 * KERNELS)
