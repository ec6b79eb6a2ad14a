"""The GPU's check, rehearsed on a CPU: each part's rows and summary, and what it refuses."""

import json

import pytest

from experiments.gpu_check import __main__ as command
from experiments.gpu_check.parts import correctness, quality
from experiments.gpu_check.settings import Settings

pytestmark = pytest.mark.usefixtures("child_paths")


PLANS = ("everything", "recompute")


def run(out, *arguments) -> int:
    return command.main(["--out", str(out), "--small", *arguments])


def read(out, part: str) -> dict:
    return json.loads((out / f"{part}.json").read_text())


@pytest.mark.slow
def test_ceilings_and_codecs(tmp_path, capsys):
    assert run(tmp_path, "--part", "ceilings", "--part", "codecs") == 0
    rows = read(tmp_path, "ceilings")["rows"]
    assert rows["copy"]["rate"]["median"] > 1e6
    products = rows["matmul_float32"]["rate"]
    assert products["lower_quartile"] <= products["median"]
    assert all("rate" in row or "absent" in row for row in rows.values())
    data = read(tmp_path, "codecs")
    speeds = [row for row in data["rows"].values() if "of_copy" in row]
    codecs = {"outlier_separated", "bit_mask", "channelwise_symmetric"}
    assert {row["codec"].split("(")[0] for row in speeds} >= codecs
    for row in speeds:
        assert min(row["seconds"], row["bytes"] - row["values"] / 8) > 0
        assert not row["is_kernel"]
    summary = data["summary"]
    assert len(summary["table"]) == 2 + len(speeds)
    assert len(summary["differ"]) == 6
    assert not any(summary["differ"].values()), "here, both are references"
    assert summary["outlier_separated encode"]["of_copy"] > 0
    assert "codecs: " in capsys.readouterr().out


def test_every_part_says_its_points_without_a_device():
    for name, (module, model) in command.PARTS.items():
        part = __import__(f"experiments.gpu_check.parts.{module}", fromlist=["points"])
        for small in (True, False):
            points = part.points(Settings(name, module, "out.json", "cache", 1.0, small, model))
            assert len(points) == len(set(points)) >= 2
    assert quality.TARGET == 1.48
    assert "action compress_offload" in correctness.points(Settings("a", "a", "a", "a", 1.0))


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path), "--part", "ceilings"]) == 1
    assert "JAX sees no GPU or TPU here; --small rehearses on a CPU" in capsys.readouterr().out
    assert read(tmp_path, "ceilings")["rows"] == {}
