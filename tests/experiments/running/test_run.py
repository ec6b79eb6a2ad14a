"""A run of any kind: what happens in which order, what appears when, and what a person sees."""

import json
import os
import signal
import time

import pytest

from experiments.command import cli
from experiments.command.load import load
from experiments.errors import DivergedError, InputError
from experiments.running.planning import Ready
from experiments.running.run import Experiment, run
from jaxmem import runs
from jaxmem.runs import Interrupted

pytestmark = pytest.mark.core
CONFIG = load("gpt_nano", ["train.steps=3", "train.log_every=2"])


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Toy:
    """An experiment of numbers: the state counts steps. `stops` raises where it is told to."""

    def __init__(self, **stops):
        self.stops, self.calls = stops, []

    def call(self, name, result=None):
        self.calls.append(name)
        if name in self.stops:
            raise self.stops[name]
        return result

    def step(self, state, batch):
        loss = self.stops.get("loss", 1.0 if state == 1 else 2.0)
        return state + 1, {"loss": loss, "grad_norm": 1.0, "image": [batch]}

    @property
    def experiment(self) -> Experiment:
        return Experiment(
            check=lambda config: self.call("check"),
            read=lambda config: self.call("read", "data"),
            says=lambda config, data: f"all of the {data}",
            first_state=lambda config, plan: self.call("first_state", 0),
            step=lambda config, data: self.call("step", Ready(self.step, None, 7)),
            batch=lambda config, data, number: self.call(f"batch {number}", number),
            evaluate=lambda config, state, data: self.call("evaluate", {"val_loss": float(state)}),
            told=lambda found: {"validation loss": f"{found['val_loss']:.1f}"},
            unit="things",
            count=lambda config: 10,
            remedy="be patient",
        )

    def run(self, out, **options):
        return run(self.experiment, CONFIG, out, name="toy", **options)


def test_a_run_checks_reads_prepares_trains_and_evaluates(tmp_path, capsys):
    toy = Toy()
    summary = toy.run(tmp_path / "out", command="make toy")
    steps = [f"batch {number}" for number in (1, 2, 3)]
    assert toy.calls == ["check", "read", "step", "first_state", *steps, "evaluate"]
    found = runs.read(tmp_path / "out")
    assert found.summary == json.loads(json.dumps(summary))
    assert (found.name, found.losses) == ("toy", ((1.0, 2.0), (2.0, 1.0), (3.0, 2.0)))
    expected = {"val_loss": 3.0, "steps": 3, "first_loss": 2.0, "final_loss": 2.0}
    expected |= {"command": "make toy", "data": "all of the data"}
    expected |= {"compiled_bytes": 7, "settings": CONFIG.model_dump()}
    assert {key: summary[key] for key in expected} == expected
    assert summary["things_per_second"] > 0
    assert [step for step, _ in found.paces] == [2.0, 3.0], "the first step has none"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "all of the data"
    assert [line.split("  ")[0] for line in lines[1:4]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[4:] == ["validation loss: 3.0", f"results: {tmp_path / 'out'}"]


@pytest.mark.parametrize("where", ["check", "read", "step", "first_state"])
@pytest.mark.parametrize("error", [InputError("of mine"), KeyboardInterrupt("of mine")])
def test_a_run_that_ends_before_its_first_step_leaves_nothing(where, error, tmp_path):
    toy = Toy(**{where: error})
    with pytest.raises(type(error), match="of mine"):
        toy.run(tmp_path / "out")
    assert toy.calls[-1] == where
    assert list(tmp_path.iterdir()) == []


def test_rows_are_written_for_tensorboard_where_that_is_asked_for(tmp_path):
    config = load("gpt_nano", ["train.steps=3", "train.tensorboard=true"])
    run(Toy().experiment, config, tmp_path, name="toy")
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"things_per_second" in events.read_bytes()


@pytest.mark.parametrize(
    "stops", [{"loss": float("nan")}, {"evaluate": DivergedError("the validation loss is nan")}]
)
def test_a_run_that_diverges_leaves_the_earlier_one_and_names_its_rows(stops, tmp_path, capsys):
    Toy().run(tmp_path, command="the first")
    assert cli.exit_code(lambda: Toy(**stops).run(tmp_path, overwrite=True)) == 3
    assert runs.read(tmp_path).summary["command"] == "the first"
    (rows,) = tmp_path.glob("unfinished-*/metrics.jsonl")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "loss is nan" in last
    assert last.endswith(f"; the run goes on from its last checkpoint, in {rows.parent}")
    assert len(rows.read_text().splitlines()) == (2 if "loss" in stops else 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["batch 2", "evaluate"])
def test_a_run_that_was_stopped_goes_on_by_the_same_command(where, number, tmp_path, capsys):
    class Stopped(Toy):
        def call(self, name, result=None):
            if name == where:
                os.kill(os.getpid(), number)
            return super().call(name, result)

    assert cli.exit_code(lambda: Stopped().run(tmp_path)) == 128 + number
    said = capsys.readouterr().err.splitlines()[-1]
    (unfinished,) = tmp_path.iterdir()
    assert said.startswith("interrupted")
    assert said.endswith(f"the run goes on from its last checkpoint, in {unfinished}")
    toy = Toy()
    summary = toy.run(tmp_path)
    done = 2 if where == "batch 2" else 3
    assert toy.calls[4:] == [f"batch {n}" for n in range(done + 1, 4)] + ["evaluate"]
    assert (summary["steps"], summary["val_loss"]) == (3, 3.0)
    assert runs.read(tmp_path).losses == ((1.0, 2.0), (2.0, 1.0), (3.0, 2.0))


def test_a_run_goes_on_with_the_settings_that_it_began_with(tmp_path, capsys):
    stopped = Toy(evaluate=KeyboardInterrupt())
    assert cli.exit_code(lambda: stopped.run(tmp_path)) == 130
    other = load("gpt_nano", ["train.steps=3", "train.seed=7", "plan.budget=none"])
    again = lambda: run(Toy().experiment, other, tmp_path, name="toy")
    assert cli.exit_code(again) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "an unfinished run with train.seed = 0, and it is 7 now" in said
    free = load("gpt_nano", ["train.steps=3", "plan.budget=none", "train.log_every=1"])
    assert run(Toy().experiment, free, tmp_path, name="toy")["val_loss"] == 3.0


def test_an_error_says_in_one_line_what_its_notes_say(capsys):
    def work():
        error = InputError("it went wrong")
        error.add_note("the rest is elsewhere")
        raise error

    assert cli.exit_code(work) == 2
    assert capsys.readouterr().err == "error: it went wrong; the rest is elsewhere\n"


class Waits:
    """A loss of a step that the device ends `seconds` after the loss is asked for."""

    def __init__(self, now, seconds):
        self.now, self.seconds, self.ndim = now, seconds, 0

    def __float__(self) -> float:
        self.now[0] += self.seconds
        return 1.0


def test_a_runs_speed_is_that_of_all_its_steps(tmp_path, monkeypatch):
    """Those before it was stopped too."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def toy(**stops):
        made = Toy(**stops)
        step = lambda state, batch: (state + 1, {"loss": Waits(now, 4.0 if stops else 1.0)})
        made.step = step
        return made

    stopped = toy(**{"batch 4": Interrupted("of mine", 15)})
    config = load("gpt_nano", ["train.steps=6", "train.save_every=0"])
    with pytest.raises(Interrupted, match="of mine"):
        run(stopped.experiment, config, tmp_path, name="toy")
    (left,) = tmp_path.glob("unfinished-*")
    kept = [row.get("step_seconds") for row in rows(left)]
    summary = run(toy().experiment, config, tmp_path, name="toy")
    seconds = [row["step_seconds"] for row in rows(tmp_path) if "step_seconds" in row]
    assert [one for one in kept if one] == seconds[:2] == [4.0, 4.0]
    assert seconds[2:] == [1.0, 1.0]
    assert summary["things_per_second"] == 10 * 4 / 10
