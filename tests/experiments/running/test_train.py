"""The command lines: a run from plan to summary, what is refused, what is left behind."""

import dataclasses
import re

import numpy as np
import pytest

import jaxmem
from experiments import plan, train
from experiments.command.load import load
from experiments.running import planning
from experiments.running.text import TEXT
from tests.experiments.states import read_run, user_numerics
from tests.shared import children

MICRO = (
    "model.layers=2", "model.width=32", "model.heads=2", "model.dropout=0.1",
    "train.steps=5", "train.batch=8", "train.sequence=64", "train.loss_chunk=32",
    "train.eval_batches=1", "optimizer.warmup=1", "sample.length=0", "plan.actions=lossless",
)  # fmt: skip
UNPLANNED = "plan.budget=none"


def run(*arguments, out):
    return train.main(["gpt_nano", *MICRO, *arguments, "--out", str(out)])


def stepping(ready):
    """The experiment with a step that is there already."""
    return dataclasses.replace(TEXT, step=lambda config, data: ready)


@pytest.fixture(scope="module")
def compiled(text):
    """The unplanned step, compiled once for all that runs it."""
    with user_numerics():
        return planning.prepare(load("gpt_nano", (*MICRO, text, UNPLANNED)))


@pytest.fixture(scope="module")
def runs(compiled, text, tmp_path_factory):
    """Two runs: unplanned, and planned for 70 % of its bytes."""
    outs = {name: tmp_path_factory.mktemp("runs") / name for name in ("unplanned", "planned")}
    with user_numerics(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "TEXT", stepping(compiled))
        assert run(text, UNPLANNED, out=outs["unplanned"]) == 0
    with user_numerics():
        budget = read_run(outs["unplanned"])[0]["compiled_bytes"] * 7 // 10
        assert run(text, f"plan.budget={budget}", "plan.explain=true", out=outs["planned"]) == 0
    return outs, budget


def test_an_unplanned_run_says_what_it_took(runs):
    outs, _ = runs
    summary, rows = read_run(outs["unplanned"])
    assert summary["budget_bytes"] is summary["plan_seconds"] is None
    assert summary["baseline_bytes"] == summary["compiled_bytes"] > 0
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert ["step_seconds" in row for row in rows] == [False, True, True, True, True]
    paces = sorted(row["step_seconds"] for row in rows[1:])
    assert 0 < paces[0] <= summary["step_seconds"] <= paces[-1]
    assert sum(paces) < summary["seconds"]
    assert (summary["first_loss"], summary["final_loss"]) == (rows[0]["loss"], rows[-1]["loss"])
    assert 5.3 < summary["first_loss"] < 5.7  # a byte: log 256 is 5.55
    assert summary["val_loss"] < summary["first_loss"] - 0.2
    assert summary["tokens_per_second"] > 0
    files = {p.name for p in outs["unplanned"].iterdir()}
    assert files == {"checkpoints", "metrics.jsonl", "summary.json"}


def test_a_planned_run_keeps_its_budget_and_the_unplanned_losses(runs):
    outs, budget = runs
    (plain, plain_rows), (summary, rows) = map(read_run, outs.values())
    assert summary["budget_bytes"] == budget
    assert summary["compiled_bytes"] <= budget < summary["baseline_bytes"]
    assert summary["baseline_bytes"] == plain["baseline_bytes"]
    assert (summary["target"], summary["config"], summary["steps"]) == ("local", "gpt_nano", 5)
    assert summary["plan_seconds"].keys() == {"profile", "solve", "compile"}
    losses = lambda rows: [row["loss"] for row in rows]
    np.testing.assert_allclose(losses(rows), losses(plain_rows), rtol=1e-5)
    np.testing.assert_allclose(summary["val_loss"], plain["val_loss"], rtol=1e-5)
    made = jaxmem.Plan.load(outs["planned"] / "plan.json")
    assert made.compiled_bytes == summary["compiled_bytes"]
    assert not made.keeps_everything
    assert {p.name for p in outs["planned"].iterdir()} == {
        "checkpoints", "metrics.jsonl", "summary.json", "plan.json", "report.html",
        "explained.json",
    }  # fmt: skip


def test_a_run_trains_with_the_size_that_its_plan_chose(text, tmp_path):
    asked = ("plan.batch=max", "plan.sizes=[4,12,1048576]", "plan.budget=20MB", "train.steps=2")
    assert run(text, *asked, "plan.explain=true", out=tmp_path / "out") == 0
    summary, _ = read_run(tmp_path / "out")
    plan = jaxmem.Plan.load(tmp_path / "out" / "plan.json")
    assert plan.batch == summary["settings"]["train"]["batch"] == 12
    assert summary["compiled_bytes"] == plan.compiled_bytes <= 20_000_000
    again = f"plan.path={tmp_path / 'out' / 'plan.json'}"
    assert run(text, again, "train.steps=2", out=tmp_path / "again") == 0
    replayed, _ = read_run(tmp_path / "again")
    assert replayed["settings"]["train"]["batch"] == 12
    assert replayed["final_loss"] == summary["final_loss"]


@pytest.mark.slow
def test_a_step_over_absent_devices_is_planned_and_not_trained(text, tmp_path, capsys):
    settings = (
        'plan.decide=["actions", "states", "sharding"]', "optimizer.accumulation=released",
        "model.loop=stack", "model.dropout=0.0", "optimizer.clip=none", "train.microbatches=2",
    )  # fmt: skip
    line = ["gpt_nano", *MICRO, *settings, "--budget", "30MB", "--target", "h200:2"]
    assert plan.main([*line, "--out", str(tmp_path / "out")]) == 0
    made = jaxmem.Plan.load(tmp_path / "out" / "plan.json")
    assert made.divided is not None
    assert made.compiled_bytes <= 30_000_000
    capsys.readouterr()
    assert run(text, *settings, "plan.target=h200:2", out=tmp_path / "run") == 2
    assert "allowed where a model trains with plan.decide" in capsys.readouterr().err


def test_a_plan_for_another_target_trains_here_and_says_if_it_is_over(runs, text, tmp_path, capsys):
    outs, _ = runs
    made = jaxmem.Plan.load(outs["planned"] / "plan.json")
    dataclasses.replace(made, target="h200", budget_bytes=1000).save(tmp_path / "plan.json")
    assert run(text, f"plan.path={tmp_path / 'plan.json'}", out=tmp_path / "out") == 0
    summary, rows = read_run(tmp_path / "out")
    assert (summary["target"], summary["budget_bytes"]) == ("h200", 1000)
    timed = ("_seconds", "_second")
    untimed = lambda row: {k: v for k, v in row.items() if not k.endswith(timed)}
    assert [*map(untimed, rows)] == [*map(untimed, read_run(outs["planned"])[1])]
    assert "warning: on this device the plan for h200 takes" in capsys.readouterr().err


def test_a_plan_for_another_model_is_exit_code_2(runs, text, tmp_path, capsys):
    outs, _ = runs
    path = f"plan.path={outs['planned'] / 'plan.json'}"
    assert run(text, path, "model.width=64", out=tmp_path / "out") == 2
    said = r"error: .*plan\.path: verify: the plan is for another model: its `\w+"
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_planning_alone_writes_a_plan_and_prints_it(text, tmp_path, capsys):
    line = ["--budget", "2GB", "--out", str(tmp_path / "new" / "out")]
    assert plan.main(["gpt_nano", *MICRO, text, *line]) == 0
    made = jaxmem.Plan.load(tmp_path / "new" / "out" / "plan.json")
    assert (made.budget_bytes, made.target) == (2 * 10**9, "local")
    assert made.compiled_bytes == made.baseline_bytes
    out, err = capsys.readouterr()
    assert str(made.budget_bytes // 10**9) in out
    assert "compile 1 of at most 6" in err
    assert [p.name for p in (tmp_path / "new" / "out").iterdir()] == ["plan.json"]


def test_a_command_line_fails_without_a_traceback(tmp_path):
    line = "gpt_nano", "model.widht=4", "--out", tmp_path / "out"
    done = children.python("-m", "experiments.train", *line, check=False)
    assert done.returncode == 2
    assert "did you mean model.width?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
