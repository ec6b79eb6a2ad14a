"""A ResNet and a task of GLUE in two processes: losses and evaluation equal the results of one
process with as many devices, and other processes resume the run.
"""

import json

import pytest

from tests.shared.pair import Pair, Run, alone
from tests.shared.training import rows, unfinished

pytestmark = [pytest.mark.jax_defaults, pytest.mark.slow]
MESH = "mesh.data=2", "mesh.fsdp=2"
SHORT = (
    "train.batch=16", "train.microbatches=2", "train.steps=6", "train.save_every=0",
    "train.log_every=1", "optimizer.warmup=2", "optimizer.learning_rate=1e-3",
)  # fmt: skip
RESNET = Run(
    "train_images",
    "resnet50_digits",
    (*SHORT, "model.depth=14", "model.width=4", "train.eval_batches=3"),
)
GLUE = Run(
    "train_glue",
    "bert_glue",
    (
        *SHORT, "model.layers=2", "model.width=16", "model.heads=2", "model.vocab=260",
        "model.dtype=float32", "train.sequence=16", "plan.budget=none", "data.task=RTE",
    ),
)  # fmt: skip
RUNS = {"ResNet": RESNET, "GLUE": GLUE}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The folder of a task whose last validation batch is short."""
    made = tmp_path_factory.mktemp("glue_data")
    (made / "RTE").mkdir()
    for side, count in (("train", 40), ("dev", 37)):
        lines = [f"{i}\ta{i % 5}\tb{i % 3}\t{'not_' * (i % 2)}entailment\n" for i in range(count)]
        named = "index\tsentence1\tsentence2\tlabel\n"
        (made / "RTE" / f"{side}.tsv").write_text("".join([named, *lines]))
    return made


@pytest.fixture(scope="module", params=RUNS)
def small(request, examples):
    """A run, and the settings of its data."""
    own = (f"data.path={examples}",) if request.param == "GLUE" else ()
    return RUNS[request.param], own


def losses(out):
    return [row["loss"] for row in rows(out)]


def found(out):
    """What the evaluation found."""
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    accuracy = summary.get("val_accuracy") or summary["validation"]["dev"]["accuracy"]
    return {"loss": summary["val_loss"], "accuracy": accuracy}


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """The folder of four devices in one process."""
    run, own = small
    out = tmp_path_factory.mktemp("whole") / "out"
    alone(out, 4, *own, *MESH, run=run)
    return out


def is_whole(out, whole):
    """Whether a run has the losses and the evaluation of another, of 6 steps that change them."""
    assert len(losses(whole)) == 6
    assert len(set(losses(whole))) == 6
    assert losses(out) == pytest.approx(losses(whole), rel=1e-5)
    assert found(out) == pytest.approx(found(whole), rel=1e-5)


def test_two_processes_are_one_with_as_many_devices(small, tmp_path, whole):
    """Each process reads the rows of its own two devices, of the 16 rows of a batch."""
    run, own = small
    out = tmp_path / "out"
    with Pair(out, *own, *MESH, run=run, ROWS=str(tmp_path)) as running:
        assert running.codes() == [0, 0], running.said(0)[-3000:] + running.said(1)[-3000:]
        assert "step 6/6" in running.said(0)
        assert "step 6/6" not in running.said(1)
    is_whole(out, whole)
    read = [json.loads((tmp_path / f"{n}.json").read_text("utf-8")) for n in range(2)]
    assert [sorted(parts) for parts in read] == [[[0, 4], [4, 8]], [[8, 12], [12, 16]]]


def test_a_killed_run_is_resumed_in_two_processes_and_in_one(small, tmp_path, whole):
    run, own = small
    out = tmp_path / "out"
    for killed, step in enumerate((2, 4)):
        with Pair(out, *own, *MESH, run=run, PAUSE="1") as running:
            running.reaches(step)
            running.running[killed].kill()
            assert None not in running.codes(60)
        assert step - 1 <= len(losses(unfinished(out))) < 6
    alone(out, 4, *own, *MESH, run=run)
    is_whole(out, whole)


@pytest.mark.parametrize("fails", ["0", "1"])
def test_an_error_in_one_process_ends_both_with_its_cause(small, tmp_path, fails):
    run, own = small
    with Pair(tmp_path / "out", *own, *MESH, run=run, FAILS=fails) as running:
        assert running.codes() == [1, 1], running.said(0)[-3000:] + running.said(1)[-3000:]
        for number in range(2):
            last = [x for x in running.said(number).splitlines() if x.startswith("error:")][-1]
            assert f"process {fails} of 2: ValueError: no batch here" in last
