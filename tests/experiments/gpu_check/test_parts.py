"""The GPU's check, rehearsed on a CPU: each part's rows and summary, and what it refuses."""

import json

import pytest

from experiments.gpu_check import __main__ as command
from experiments.gpu_check.parts import correctness, memory, prediction, quality, times
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


@pytest.mark.slow
@pytest.mark.parametrize("part", ["memory", "times_117m", "prediction"])
def test_the_parts_that_plan(part, tmp_path):
    code = run(tmp_path, "--part", part, "--limit", "500")
    data = read(tmp_path, part)
    assert (data["unfinished"], data["failed"], code) == ([], [], 0)
    summary = data["summary"]
    if part == "memory":
        assert summary["steps"] == 3
        assert summary["farthest"] is None  # a CPU does not count
    elif part == "times_117m":
        assert summary["rounds"] == 2
        assert len(summary["plans"]) == 4
        for name, one in summary["plans"].items():
            assert one["against_best"]["median"] > 0
            assert data["rows"][name]["bytes"] <= one["budget_bytes"]
    else:
        distinct = {str(row["stored"]) for row in data["rows"].values() if "plan" in row}
        assert summary["plans"] == len(distinct) >= 1
        assert ("spearman" in summary) == (len(distinct) > 1)
        assert data["rows"]["round 0"]["seconds"].keys() >= {"end keep_everything"}


def test_every_part_says_its_points_without_a_device():
    for name, (module, model) in command.PARTS.items():
        part = __import__(f"experiments.gpu_check.parts.{module}", fromlist=["points"])
        for small in (True, False):
            points = part.points(Settings(name, module, "out.json", "cache", 1.0, small, model))
            assert len(points) == len(set(points)) >= 2
    assert (times.BUDGETS, len(prediction.SETS) * len(prediction.SHARES)) == (4, 15)
    assert memory.APART
    assert quality.TARGET == 1.48
    assert "action compress_offload" in correctness.points(Settings("a", "a", "a", "a", 1.0))


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path), "--part", "ceilings"]) == 1
    assert "JAX sees no GPU or TPU here; --small rehearses on a CPU" in capsys.readouterr().out
    assert read(tmp_path, "ceilings")["rows"] == {}


def test_budgets_are_those_of_baselines_that_fit():
    row = lambda size, fits=True: {"bytes": size, "fits": fits}
    rows = {f"baseline {i}": row(10 * i) for i in range(1, 8)}
    rows |= {"baseline big": row(65, False), "plan 0": row(1)}
    assert times.budgets(rows | {"baseline keep_everything": row(70)}) == [10, 30, 40, 60]
    assert times.budgets(rows | {"baseline keep_everything": row(999, False)}) == [10, 30, 50, 70]
    assert times.budgets({"baseline a": row(10), "baseline b": row(40)}) == [10, 20, 30, 40]
    with pytest.raises(ValueError, match="no baseline fits"):
        times.budgets({"baseline big": row(10, False)})


def test_a_plan_is_compared_in_pairs_with_what_fits_its_budget():
    seconds = [
        {"plan 0": 1.0, "baseline a": 2.0, "baseline b": 9.0},
        {"plan 0": 3.0, "baseline a": 4.0, "baseline b": 9.0},
    ]
    rows = {f"round {i}": {"seconds": one} for i, one in enumerate(seconds)}
    rows |= {"baseline a": {"bytes": 10}, "baseline b": {"bytes": 20}}
    rows["plan 0"] = {"bytes": 9, "budget_bytes": 10, "predicted_seconds": 1.0}
    settings = Settings("times", "times", "a", "a", 1.0, small=True, model="gpt_117m")
    found = times.summary(rows, settings)
    (plan,) = found["plans"].values()
    assert plan["best_baseline"] == "baseline a"
    assert plan["ratios"].keys() == {"baseline a"}  # b is over the budget
    assert plan["against_best"]["median"] == (1 / 2 + 3 / 4) / 2
    assert plan["faster_than_best"]
    assert found["steps"]["plan 0"]["tokens_per_second"] == 4 * 32 / 2.0


def test_predictions_are_ranked_and_measured_against_the_clock():
    clock = {"end keep_everything": 1.0, "plan a 1": 1.1, "plan b 1": 1.3, "plan c 1": 1.2}
    rows = {"round 0": {"seconds": clock}}
    rows |= {n: {"predicted_seconds": s * 1.1, "baseline_seconds": 1.1} for n, s in clock.items()}
    settings = Settings("prediction", "prediction", "a", "a", 1.0)
    found = prediction.summary(rows, settings)
    assert found["spearman"] == 1.0
    assert found["relative_error"]["median"] == pytest.approx(0.1)
    rows["plan b 1"]["predicted_seconds"] = 0.5
    assert prediction.summary(rows, settings)["spearman"] == -0.5
