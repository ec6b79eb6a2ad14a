"""The benchmark on a GPU, rehearsed on a CPU: its steps run, and its summary compares them."""

import json

import pytest

from benchmarks import gpu
from benchmarks.shared.results import Benchmark, Report
from experiments.command.load import load
from experiments.gpu_check.settings import TINY
from experiments.steps.step import abstract, make_step
from jaxmem import plan as make_plan

MODEL = "gpt_117m"


def plans(folder, rows: dict) -> None:
    path = folder / "gpu_plans.json"
    found = {"results": {f"{MODEL} {key}": row for key, row in rows.items()}}
    path.write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture
def report(tmp_path, monkeypatch) -> Report:
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    return Report("gpu_117m", "gpu", tmp_path)


def test_a_step_is_compared_with_its_prediction_and_a_plan_with_the_policies_that_fit(report):
    row = lambda nbytes, peak, absent, seconds, budget=None: {
        "bytes": nbytes, "peak_bytes": peak, "absent_bytes": absent,
        "predicted_seconds": seconds, "budget": budget,
    }  # fmt: skip
    report.results |= {
        "policy a": row(11, 20, 10, 2.0),
        "policy b": row(21, None, 20, 1.5),
        "policy c": row(31, None, 30, 1.0) | {"error": "RESOURCE_EXHAUSTED"},
        "plan all 0.5": row(24, 24, 22, 3.0, 25),
    }
    for number, scale in enumerate((1.0, 2.0, 3.0)):
        seconds = {"policy a": 4.0, "policy b": 1.0, "plan all 0.5": 1.5}
        report.results[f"round {number}"] = {key: scale * s for key, s in seconds.items()}
    found = gpu.on_gpu(report)
    assert found["steps"].keys() == {"policy a", "policy b", "plan all 0.5"}
    a = found["steps"]["policy a"]
    assert (a["predicted_seconds"], a["seconds"]["median"]) == (2.0, 8.0)
    assert a["apart"] == pytest.approx(-0.75)
    assert a["compiled without the GPU / peak - 1"] == pytest.approx(-0.5)
    assert found["steps"]["policy b"]["compiled without the GPU / peak - 1"] is None
    assert found["steps"]["plan all 0.5"]["apart"] == 0.0
    assert found["median |apart|"] == 0.25, "of 0.75, 0.25 and 0"
    assert found["largest |compiled / peak - 1|"] == pytest.approx(0.5)
    best = found["against the best policy"]["plan all 0.5"]
    assert best == {"best policy": "policy b", "ratio": 1.5}


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_policies_and_plans_run_in_turns(tmp_path, report, monkeypatch):
    config = load(MODEL, TINY)
    monkeypatch.setattr(gpu, "load", lambda *_: config)
    found = make_plan(lambda p: make_step(config, p), *abstract(config), budget="90%")
    row = {"found": True, "budget": found.budget_bytes, "compiled_bytes": found.compiled_bytes}
    row |= {"predicted_seconds": found.predicted_seconds, "plan": found.to_json()}
    policy = {"bytes": 1, "xla_seconds": 1.0, "host_seconds": 0.0}
    plans(tmp_path, {"policy keep_everything": policy, "plan all 0.9": row})
    Benchmark((MODEL,), gpu.on_the_gpu, summary=gpu.on_gpu).write(report)
    assert report.summary is not None
    steps = report.summary["steps"]
    assert steps.keys() == {"policy keep_everything", "plan all 0.9"}
    for step in steps.values():
        assert step["bytes, compiled on the GPU"] > 1
        assert step["seconds"]["count"] == gpu.ROUNDS
        assert step["bytes, the device's peak"] is None  # a CPU does not count
