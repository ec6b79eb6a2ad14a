"""The loop: it goes on where it stopped, bit for bit; ends by a signal with what it has saved; and
goes back where a loss is not finite.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._xla.process import child_environment
from jaxmem.errors import JaxmemWarning, NotFiniteError, RunError
from jaxmem.runs import Interrupted, record, train
from tests.programs import durable_run
from tests.shared import children

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]


def rows(folder):
    """The rows without what a clock said."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "step_seconds"} for line in lines]


def unfinished(out):
    (path,) = out.glob("unfinished-*")
    return path


def checkpoints(path):
    return sorted(int(p.parent.name) for p in path.glob("checkpoints/*/manifest.json"))


class Stop(Exception):
    """What ends a run from within."""


def run(out, steps=8, stop=None, data=durable_run.batch, step=durable_run.step, **given):
    """Trains, and ends by `stop`, an error, as the batch of step stop[0] is asked for."""

    def asked(number):
        if stop is not None and number == stop[0]:
            raise stop[1]
        return data(number)

    # a fixture of the module has not the suite's strictness, nor what lifts it
    with jax.numpy_dtype_promotion("standard"), record(out, resume=True) as found:
        given = {"save_every": 0, "keep": 3} | given
        state = train(step, durable_run.first, asked, steps=steps, run=found, **given)
        found.summary({"config": "a run"})
    return durable_run.digest(state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 8 steps: its rows and its last state's digest."""
    out = tmp_path_factory.mktemp("whole") / "out"
    digest = run(out)
    return rows(out), digest


@pytest.mark.parametrize("at", [2, 3, 5, 8])
def test_a_run_that_failed_goes_on_bit_for_bit(tmp_path, whole, at):
    out = tmp_path / "out"
    with pytest.raises(Stop) as caught:
        run(out, stop=(at, Stop()))
    assert "the run goes on from its last checkpoint" in caught.value.__notes__[0]
    assert run(out) == whole[1]
    assert rows(out) == whole[0]
    assert checkpoints(out)[-1] == 8
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints", "metrics.jsonl", "summary.json"]


def test_without_a_checkpoint_it_begins_again(tmp_path, whole):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop=(3, Stop()), save_every=1e6)
    assert run(out) == whole[1]


def test_rows_of_steps_that_are_done_again_are_let_go_and_torn_ones_too(tmp_path, whole):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop=(6, Stop()))
    path = unfinished(out)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    seen = []
    assert run(out, each=lambda number, row: seen.append(number)) == whole[1]
    assert rows(out) == whole[0]
    assert seen == [6, 7, 8]


def test_it_goes_on_from_the_one_before_where_the_newest_was_changed(tmp_path, whole):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop=(6, Stop()))
    newest = unfinished(out) / "checkpoints" / "00000005"
    path = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(JaxmemWarning, match="00000005' is not used: "):
        assert run(out) == whole[1]
    assert rows(out) == whole[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_step_once_it_is_saved(tmp_path, whole, number):
    out = tmp_path / "out"

    def batch(step):
        if step == 4:
            os.kill(os.getpid(), number)
        return durable_run.batch(step)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="after step 4") as caught:
        run(out, data=batch, save_every=1e6)
    assert caught.value.number == number
    assert signal.getsignal(number) is before
    assert checkpoints(unfinished(out)) == [4]
    assert run(out) == whole[1]
    assert rows(out) == whole[0]


def test_a_signal_that_is_ignored_stays_so(tmp_path, whole):
    def batch(step):
        os.kill(os.getpid(), signal.SIGINT)
        return durable_run.batch(step)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(tmp_path / "out", data=batch) == whole[1]
    finally:
        signal.signal(signal.SIGINT, before)


def start(out, **environment):
    command = [sys.executable, "-m", "tests.programs.durable_run", str(out), "12"]
    env = child_environment(children.finding_packages()) | environment
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_loses_no_more_than_what_it_had_not_saved(tmp_path):
    out, draw = tmp_path / "out", random.Random(0)
    kept = 0
    for number in (signal.SIGKILL, signal.SIGTERM):
        with start(out, PAUSE="0.05") as process:
            for _ in range(kept + 2):
                process.stdout.readline()
            time.sleep(draw.uniform(0, 0.1))
            process.send_signal(number)
            assert process.wait() == (-9 if number == signal.SIGKILL else 143)
        there = checkpoints(unfinished(out))[-1]
        assert there > kept, "what had been saved is lost"
        kept = there
    with start(out) as ended, start(tmp_path / "whole") as whole:
        last = [process.stdout.read().splitlines()[-1] for process in (ended, whole)]
    assert (ended.returncode, whole.returncode) == (0, 0)
    assert last[0] == last[1]
    assert last[0].startswith("digest ")
    assert rows(out) == rows(tmp_path / "whole")


def worse(*numbers):
    def batch(number):
        one = durable_run.batch(number)
        return one | {"scale": np.float32("inf")} if number in numbers else one

    return batch


def test_a_step_that_is_not_finite_is_left_out(tmp_path):
    without = run(tmp_path / "a", data=worse(4, 5))
    found = rows(tmp_path / "a")
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["step"] for row in found if row.get("skipped")] == [4, 5]
    assert all(np.isfinite(row.get("loss", 0.0)) for row in found)
    # It goes on so after a failure too.
    with pytest.raises(Stop):
        run(tmp_path / "b", data=worse(4, 5), stop=(7, Stop()))
    assert run(tmp_path / "b", data=worse(4, 5)) == without
    assert rows(tmp_path / "b") == found


def test_steps_in_a_row_that_are_not_finite_end_it(tmp_path):
    with pytest.raises(NotFiniteError, match=r"step 6: loss is nan|loss is inf.*3\. step in a row"):
        run(tmp_path / "a", data=worse(4, 5, 6))
    with pytest.raises(NotFiniteError, match="of the checkpoints there is none yet"):
        run(tmp_path / "b", data=worse(2), save_every=1e6)


class Numbers:
    """An iterator of batches that tells where it is."""

    def __init__(self, kind):
        self.at, self.kind = 0, kind

    def __next__(self):
        self.at += 1
        return durable_run.batch(self.at)

    def get_state(self):
        return str(self.at).encode() if self.kind is bytes else {"at": self.at}

    def set_state(self, state):
        self.at = int(state) if self.kind is bytes else state["at"]


@pytest.mark.parametrize("kind", [bytes, dict])
def test_an_iterators_position_is_kept(tmp_path, whole, kind):
    def go(stop):
        numbers, steps = Numbers(kind), []

        def step(state, batch):
            steps.append(numbers.at)
            if numbers.at == stop:
                raise Stop
            return durable_run.step(state, batch)

        with record(tmp_path / "out", resume=True) as found:
            given = {"steps": 8, "run": found, "save_every": 0}
            state = train(step, durable_run.first, numbers, **given)
        return steps, durable_run.digest(state)

    with pytest.raises(Stop):
        go(5)
    assert go(None) == ([5, 6, 7, 8], whole[1])


def test_states_lie_where_they_did(tmp_path):
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    first = lambda: {"a": jax.device_put(jnp.arange(4.0), host), "n": jnp.int32(0)}

    def step(state, batch):
        assert state["a"].sharding == host
        if batch == 3 and not again:
            raise Stop
        return state | {"n": state["n"] + 1}, {"loss": state["n"]}

    for again in (False, True):
        try:
            with record(tmp_path / "out", resume=True) as found:
                data = lambda number: number
                state = train(step, first, data, steps=4, run=found, save_every=0)
        except Stop:
            assert not again
    assert int(state["n"]) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": 0}, "got keep=0"),
        ({"save_every": -1}, "save_every=-1"),
        ({"not_finite": 0}, "not_finite=0"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, given, message):
    with pytest.raises(RunError, match=message):
        run(tmp_path / "out", **given)


@pytest.mark.parametrize(
    ("resume", "given", "message"),
    [
        (True, {"data": [1]}, "`data` is list"),
        (True, {"settings": {"rate": float("inf")}}, "`settings` is .*, which a checkpoint cannot"),
        (True, {"state": {}}, "`state` holds no array"),
        (False, {}, "does not go on with"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_first(tmp_path, resume, given, message):
    arguments = {"step": durable_run.step, "state": durable_run.first, "data": durable_run.batch}
    with record(tmp_path, resume=resume) as found, pytest.raises(RunError, match=message):
        train(**arguments | given, steps=1, run=found)


def test_other_settings_or_another_state_are_refused(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop=(4, Stop()), settings={"rate": 0.1})
    with pytest.raises(RunError, match=r"with rate = 0.1, and it is 0.2 now; .* overwrite=True"):
        run(out, settings={"rate": 0.2})
    with (
        record(out, resume=True) as found,
        pytest.raises(RunError, match=r"where the state has \['w'\]"),
    ):
        train(
            durable_run.step, {"w": jnp.zeros(3)}, durable_run.batch, steps=8, run=found,
            settings={"rate": 0.1},
        )  # fmt: skip
    assert isinstance(run(out, settings={"rate": 0.1}), str)


def test_overwriting_begins_again(tmp_path, whole):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop=(4, Stop()))
    with record(out, resume=True, overwrite=True) as found:
        assert not found.resumed
        given = {"steps": 8, "run": found, "save_every": 0}
        state = train(durable_run.step, durable_run.first, durable_run.batch, **given)
    assert durable_run.digest(state) == whole[1]


@pytest.mark.parametrize("name", ["mine", "100/mine", "00000100/mine"])
def test_checkpoints_of_somebodys_own_are_left_alone(tmp_path, name):
    """Those of orbax's managers too, which are named by their steps."""
    own = tmp_path / "out" / "checkpoints" / name
    own.parent.mkdir(parents=True)
    own.write_text("a")
    with pytest.raises(RunError, match="checkpoints' is not of a run"):
        run(tmp_path / "out")
    begun = record(tmp_path / "out", resume=True, overwrite=True)
    with pytest.raises(RunError, match="is not of a run"):
        begun.__enter__()
    assert own.read_text() == "a"


def test_checkpoints_without_orbax_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(RunError, match=r"pip install jaxmem\[runs\]"):
        run(tmp_path / "out")


def test_it_is_public():
    assert jaxmem.runs.train is train


def stopped(out, step, state, data=jnp.float32, at=4, steps=6, **given):
    """The last states of a run that fails at `at` and goes on, and of one that does not."""
    found = []
    for folder, fails in (("failing", at), ("failing", None), ("whole", None)):

        def batch(number, fails=fails):
            if number == fails:
                raise Stop
            return data(number)

        arguments = {"steps": steps, "save_every": 0} | given
        try:
            with jax.numpy_dtype_promotion("standard"), record(out / folder, resume=True) as run:
                found.append(train(step, state, batch, run=run, **arguments))
        except Stop:
            assert fails
    return found


def alike(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.result_type(x) == jnp.result_type(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


STATES = {
    "a number that becomes an array": (
        lambda s, b: ({"w": s["w"] + b, "n": s["n"] + 1}, {"loss": b}),
        lambda: {"w": jnp.zeros(3), "n": 0},
    ),
    "an array of a weak type": (
        lambda s, b: (
            {"w": s["w"] * s["by"] + b.astype(jnp.bfloat16), "by": s["by"]},
            {"loss": jnp.sum(s["w"]).astype(jnp.float32)},
        ),
        lambda: {"w": jnp.ones(3, jnp.bfloat16), "by": jnp.asarray(1.01)},
    ),
    "a metric with the name of the step": (
        lambda s, b: (s + b, {"loss": b, "step": b * 1000, "text": None}),
        lambda: jnp.zeros(()),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_all_kinds_go_on(tmp_path, name):
    step, first = STATES[name]
    jitted = jax.jit(step) if "text" not in name and "metric" not in name else step
    got, want = stopped(tmp_path, jitted, first)
    alike(got, want)
    assert rows(tmp_path / "failing") == rows(tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]


def test_a_first_state_that_is_given_is_kept(tmp_path):
    first = jnp.ones(3)
    step = lambda s, b: (s + b, {"loss": jnp.sum((s - first) ** 2)})
    alike(*stopped(tmp_path, step, first))


def test_a_model_that_can_be_called_is_a_state(tmp_path):
    model = jax.tree_util.Partial(jnp.multiply, jnp.ones(3))
    step = lambda m, b: (jax.tree.map(lambda a: a + b, m), {"loss": m(b).sum()})
    alike(*stopped(tmp_path, step, model))


def test_what_a_run_has_done_is_not_taken_back(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path / "out", stop=(6, Stop()))
    with pytest.raises(RunError, match="the checkpoint is of step 5, and `steps` is 3"):
        run(tmp_path / "out", steps=3)
    with record(tmp_path / "twice", resume=True) as found:
        arguments = {"steps": 2, "run": found}
        train(lambda s, b: (s, {"loss": b}), jnp.zeros(2), jnp.float32, **arguments)
        with pytest.raises(RunError, match="has been trained in already"):
            train(lambda s, b: (s, {"loss": b}), jnp.zeros(2), jnp.float32, **arguments)


def test_fewer_are_kept_than_before_and_the_newest_is_broken(tmp_path, whole):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop=(6, Stop()), keep=2)
    for path in (unfinished(out) / "checkpoints" / "00000005").rglob("manifest.json"):
        path.unlink()
    with pytest.warns(JaxmemWarning, match="00000005"), pytest.raises(Stop):
        run(out, stop=(6, Stop()), keep=1)
    assert run(out, keep=1) == whole[1]


def test_a_second_signal_ends_it_at_once_and_it_begins_again(tmp_path, whole):
    def batch(step):
        for _ in range(2 if step == 3 else 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return durable_run.batch(step)

    with pytest.raises(Interrupted):
        run(tmp_path / "out", data=batch, save_every=1e6)
    assert not (tmp_path / "out" / "summary.json").exists()
    assert run(tmp_path / "out") == whole[1]


def test_an_interrupt_beside_a_loss_that_is_not_finite_is_an_interrupt(tmp_path):
    def data(number):
        if number == 3:
            raise KeyboardInterrupt
        return jnp.float32(jnp.nan if number == 2 else number)

    with record(tmp_path / "out", resume=True) as found, pytest.raises(KeyboardInterrupt):
        train(lambda s, b: (s + b, {"loss": b}), jnp.zeros(()), data, steps=6, run=found)


def test_overwriting_forgets_an_unfinished_run(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(out, stop=(4, Stop()), settings={"rate": 1})
    with pytest.raises(Stop), record(out, resume=True, overwrite=True):
        raise Stop
    assert run(out, settings={"rate": 2})


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_in_the_place_of_checkpoints_is_told_first(tmp_path, kind):
    out = tmp_path / "out"
    out.mkdir()
    place = out / "checkpoints"
    place.write_text("") if kind == "file" else place.symlink_to(tmp_path)
    with pytest.raises(RunError, match="is not of a run"):
        run(out)


def test_results_are_where_they_were_asked_for_wherever_the_process_goes(
    tmp_path, whole, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def batch(number):
        os.chdir(tmp_path / "elsewhere")
        return durable_run.batch(number)

    assert run("out", data=batch) == whole[1]
    assert rows(tmp_path / "out") == whole[0]
    assert list((tmp_path / "elsewhere").iterdir()) == []
