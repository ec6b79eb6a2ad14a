"""A run that stopped goes on where it was, bit for bit: after an error, a signal or a kill. A run
goes back where a loss is not finite. What cannot be trained or resumed is refused first.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem._target.deviceless.process import child_environment
from jaxmem.errors import JaxmemWarning, NotFiniteError, RunError
from jaxmem.runs import Interrupted, record, train
from tests.programs import durable_run
from tests.shared import children
from tests.shared.refused import refused
from tests.shared.training import Numbers, Stop, checkpoints, fails_at, rows, run, unfinished, worse


@pytest.mark.quick("2", "8")
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


def test_where_nothing_is_saved_but_the_beginning_it_begins_again(tmp_path, whole):
    """With other settings too."""
    out = tmp_path / "out"
    fails_at(out, 3, save_every=1e6, settings={"rate": 1})
    assert checkpoints(unfinished(out)) == [0]
    assert run(out, settings={"rate": 2}) == whole[1]
    assert rows(out) == whole[0]


def test_what_is_saved_first_is_of_the_settings_that_it_began_with_last(tmp_path):
    out = tmp_path / "out"
    for rate in (1, 2):
        with pytest.raises(Stop):
            run(out, stop=(2, Stop()), save_every=1e6, settings={"rate": rate})
    notes = json.loads((unfinished(out) / "checkpoints/00000000/manifest.json").read_text())
    assert notes["notes"]["settings"] == {"rate": 2}


def test_rows_of_steps_that_are_done_again_are_let_go_and_torn_ones_too(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 6)
    path = unfinished(out)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    seen = []
    assert run(out, each=lambda number, row: seen.append(number)) == whole[1]
    assert rows(out) == whole[0]
    assert seen == [6, 7, 8]


@pytest.mark.quick('{"loss": 1.0}\\n')
@pytest.mark.parametrize("line", [b'{"step": 2, "lo\n', b"\xff\n", b"[1]\n", b'{"loss": 1.0}\n'])
def test_a_row_that_is_none_is_told_and_those_after_it_stay(tmp_path, whole, line):
    out = tmp_path / "out"
    fails_at(out, 6)
    path = unfinished(out) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line, *lines[2:]]))
    said = r"line 2 of '.*out/unfinished-.*/metrics.jsonl' is no row of a step"
    with pytest.warns(JaxmemWarning, match=said):
        run(out)
    assert rows(out) == [whole[0][0], *whole[0][2:]]


def test_it_goes_on_from_the_one_before_where_the_newest_was_changed(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 6)
    newest = unfinished(out) / "checkpoints" / "00000005"
    # The manifest may be the largest file; it ends in a newline, which it can lose.
    data = (p for p in newest.rglob("*") if p.is_file() and p.name != "manifest.json")
    path = max(data, key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(JaxmemWarning, match="00000005' is not used: "):
        assert run(out) == whole[1]
    assert rows(out) == whole[0]


def test_fewer_are_kept_than_before_and_the_newest_is_broken(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 6, keep=2)
    for path in (unfinished(out) / "checkpoints" / "00000005").rglob("manifest.json"):
        path.unlink()
    with pytest.warns(JaxmemWarning, match="00000005"), pytest.raises(Stop):
        run(out, stop=(6, Stop()), keep=1)
    assert run(out, keep=1) == whole[1]


@pytest.mark.quick("dict")
@pytest.mark.parametrize("kind", [bytes, dict])
def test_an_iterators_position_is_kept(tmp_path, whole, kind):
    def go(stop):
        numbers, steps = Numbers(kind=kind), []

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


def test_overwriting_forgets_an_unfinished_run(tmp_path, whole):
    out = tmp_path / "out"
    fails_at(out, 4, settings={"rate": 1})
    with pytest.raises(Stop), record(out, resume=True, overwrite=True) as found:
        raise Stop
    assert not found.resumed
    assert run(out, settings={"rate": 2}) == whole[1]


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


def killed(number, *steps):
    """Batches; for each of `steps` this process gets a signal as the step's batch is read."""

    def batch(step):
        for _ in range(steps.count(step)):
            os.kill(os.getpid(), number)
        return durable_run.batch(step)

    return batch


@pytest.mark.quick("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_step_once_it_is_saved(tmp_path, whole, number):
    out = tmp_path / "out"
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="after step 4") as caught:
        run(out, data=killed(number, 4), save_every=1e6)
    assert caught.value.number == number
    assert signal.getsignal(number) is before
    assert checkpoints(unfinished(out)) == [0, 4]
    assert run(out) == whole[1]
    assert rows(out) == whole[0]


def test_a_signal_that_is_ignored_stays_so(tmp_path, whole):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(tmp_path / "out", data=killed(signal.SIGINT, *range(1, 9))) == whole[1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_it_at_once_and_it_begins_again(tmp_path, whole):
    with pytest.raises(Interrupted):
        run(tmp_path / "out", data=killed(signal.SIGTERM, 3, 3), save_every=1e6)
    assert not (tmp_path / "out" / "summary.json").exists()
    assert run(tmp_path / "out") == whole[1]


def test_a_killed_process_loses_no_more_than_what_it_had_not_saved(tmp_path):
    out = tmp_path / "out"
    # The process computes as this one, so that rows are equal bit for bit.
    settings = {"JAX_ENABLE_X64": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PAUSE": "0.05"}
    env = child_environment(children.finding_packages()) | settings
    command = [sys.executable, "-m", "tests.programs.durable_run", str(out), "12"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(3):  # the third row is written once the first step is on the disk
            process.stdout.readline()
        time.sleep(random.Random(0).uniform(0, 0.1))
        process.kill()
        assert process.wait() == -9
    assert checkpoints(unfinished(out))[-1] > 0, "what had been saved is lost"
    resumed = []
    each = lambda number, row: resumed.append(number)
    assert run(out, steps=12, each=each) == run(tmp_path / "whole", steps=12)
    assert 1 < resumed[0] <= 12
    assert rows(out) == rows(tmp_path / "whole")
    assert [row["step"] for row in rows(out)] == [*range(1, 13)]


def left_out(out):
    return [row["step"] for row in rows(out) if row.get("skipped")]


def test_a_step_that_is_not_finite_is_left_out(tmp_path):
    without = run(tmp_path / "a", data=worse(4, 5))
    found = rows(tmp_path / "a")
    assert [row["step"] for row in found] == list(range(1, 9))
    assert left_out(tmp_path / "a") == [4, 5]
    assert all(np.isfinite(row.get("loss", 0.0)) for row in found)
    # It goes on so after a failure too.
    fails_at(tmp_path / "b", 7, data=worse(4, 5))
    assert run(tmp_path / "b", data=worse(4, 5)) == without
    assert rows(tmp_path / "b") == found


def test_before_the_first_timed_save_it_goes_back_to_the_beginning(tmp_path):
    without = run(tmp_path / "a", data=worse(1, 4))
    assert run(tmp_path / "b", data=worse(1, 4), save_every=1e6) == without
    assert rows(tmp_path / "b") == rows(tmp_path / "a")
    assert checkpoints(tmp_path / "b") == [0, 8]


def test_steps_in_a_row_that_are_not_finite_end_it(tmp_path):
    message = r"step 5: the loss is \w+ .*3\. step in a row; of the checkpoints that of step 2 is"
    with pytest.raises(NotFiniteError, match=message):
        run(tmp_path / "a", data=worse(4, 5, 6))
    with pytest.raises(NotFiniteError, match=r"step 3: .* of the checkpoints that of step 0 is"):
        run(tmp_path / "b", data=worse(1, 2, 3))
    with pytest.raises(NotFiniteError, match=r"step 4: .*for the 1\. step in a row; .* of step 3"):
        run(tmp_path / "c", data=worse(4), not_finite=1)


def spoils(*numbers):
    """Steps whose update spoils the state, while their own metrics are finite."""

    def batch(number):
        return durable_run.batch(number) | {"spoils": number in numbers}

    def step(state, batch):
        batch = dict(batch)
        spoils = batch.pop("spoils")
        (params, *rest), metrics = durable_run.step(state, batch)
        if spoils:
            params = params | {"w": params["w"].at[0, 0].set(jnp.nan)}
        return (params, *rest), metrics

    return {"data": batch, "step": step}


@pytest.mark.quick("saved-1", "not saved-3")
@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("save_every", [0, 1e6], ids=["saved", "not saved"])
def test_a_step_that_spoils_the_state_is_left_out(tmp_path, keep, save_every):
    """Whether or not the spoilt state was saved."""
    given = {"keep": keep, "save_every": save_every}
    found = run(tmp_path / "a", **given, **spoils(5))
    assert left_out(tmp_path / "a") == [5]
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, 9))
    assert found == run(tmp_path / "b", data=worse(5))
    assert len(checkpoints(tmp_path / "a")) <= keep
    assert checkpoints(tmp_path / "a")[-1] == 8


def test_a_spoilt_checkpoint_is_found_out_by_the_run_that_goes_on_from_it(tmp_path):
    out = tmp_path / "out"
    fails_at(out, 6, keep=1, **spoils(5))
    assert checkpoints(unfinished(out)) == [4, 5]
    run(out, keep=1, **spoils(5))
    assert left_out(out) == [5]
    assert checkpoints(out) == [8]


def test_updates_that_spoil_the_state_again_and_again_end_it(tmp_path):
    message = r"step 8: .* for the 3\. step in a row; of the checkpoints that of step 5 is whole"
    with pytest.raises(NotFiniteError, match=message):
        run(tmp_path, steps=30, **spoils(*range(3, 30)))


def test_an_interrupt_beside_a_loss_that_is_not_finite_is_an_interrupt(tmp_path):
    def data(number):
        if number == 3:
            raise KeyboardInterrupt
        return jnp.float32(jnp.nan if number == 2 else number)

    with record(tmp_path / "out", resume=True) as found, pytest.raises(KeyboardInterrupt):
        train(lambda s, b: (s + b, {"loss": b}), jnp.zeros(()), data, steps=6, run=found)


WHOLE, NAN = "a whole number of at least", float("nan")


@refused(
    RunError,
    *(
        ("steps", value, f"`steps` is .*; expected {WHOLE} 0")
        for value in (-1, True, 2.0, None, NAN)
    ),
    *(("keep", value, f"`keep` is .*; expected {WHOLE} 1") for value in (0, "3", 1.5)),
    ("not_finite", None, f"`not_finite` is None; expected {WHOLE} 1"),
    *(("save_every", value, "expected a number of seconds") for value in (-1, "60", None, NAN)),
    ("settings", [1], r"`settings` is \[1\]; expected a dict"),
    ("units", 4096, "`units` is 4096; expected a dict"),
)
def test_wrong_arguments_are_refused(name, value, tmp_path):
    run(tmp_path / "out", **{name: value})


@refused(
    RunError,
    (lambda s, b: s, "returned ArrayImpl ; expected a pair"),
    (lambda s, b: None, "returned NoneType"),
    (lambda s, b: (s, {}, {}), r"returned tuple \['ArrayImpl', 'dict', 'dict'\]"),
    (lambda s, b: (s, None), r"returned tuple \['ArrayImpl', 'NoneType'\]"),
    (lambda s, b: (s, [b]), "'list'.*; expected a pair"),
    (lambda s, b: ({"w": s}, {"loss": b}), r"than it received: \['w'\] float64\[2\] where"),
    (lambda s, b: ((s, s), {"loss": b}), r"it received: \[0\] float64\[2\] where"),
    (lambda s, b: (s[:1], {"loss": b}), r"float64\[1\] where .* float64\[2\]"),
    (lambda s, b: (s.astype("float32"), {"loss": b}), r"float32\[2\] where .* float64\[2\]"),
    (lambda s, b: (s, {"loss": s}), r"step 1 returned Array\(.* as 'loss'; expected a real scalar"),
    (lambda s, b: (s, {"loss": "low"}), "step 1 returned 'low' as 'loss'"),
    (lambda s, b: (s, {"loss": np.complex64(1)}), "as 'loss'"),
    (lambda s, b: (s, {"loss": b, "grad_norm": 1j}), "step 1 returned 1j as 'grad_norm'"),
)
def test_wrong_results_of_a_step_are_refused(step, tmp_path):
    with record(tmp_path, resume=True) as found:
        train(step, jnp.zeros(2), lambda n: 1.0, steps=2, run=found)


def test_a_number_of_pythons_in_the_state_may_become_an_array(tmp_path):
    step = lambda s, b: ({"n": jnp.int32(s["n"] + 1)}, {"loss": b, "picture": s, "grad_norm": None})
    with record(tmp_path, resume=True) as found:
        assert train(step, {"n": 0}, float, steps=np.int64(2), run=found)["n"] == 2
    assert [row.keys() - {"step_seconds"} for row in rows(tmp_path)] == [{"step", "loss"}] * 2


@pytest.mark.jax_defaults
def test_a_first_state_of_numpy_may_have_64_bits(tmp_path):
    step = lambda s, b: ({name: jnp.asarray(a) + 1 for name, a in s.items()}, {"loss": b})
    with record(tmp_path, resume=True) as found:
        state = train(step, {"w": np.zeros(2), "n": np.int64(0)}, float, steps=2, run=found)
    assert (state["w"].dtype, state["n"].dtype) == (jnp.float32, jnp.int32)


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
    fails_at(out, 4, settings={"rate": 0.1})
    with pytest.raises(RunError, match=r"with rate = 0.1, and it is 0.2 now; .* overwrite=True"):
        run(out, settings={"rate": 0.2})
    another, other = pytest.raises(RunError, match=r"where the state has \['w'\]"), jnp.zeros(3)
    with record(out, resume=True) as found, another:
        given = {"steps": 8, "run": found, "settings": {"rate": 0.1}}
        train(durable_run.step, {"w": other}, durable_run.batch, **given)
    assert isinstance(run(out, settings={"rate": 0.1}), str)


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


def test_what_a_run_has_done_is_not_taken_back(tmp_path):
    fails_at(tmp_path / "out", 6)
    with pytest.raises(RunError, match="the checkpoint is of step 5, and `steps` is 3"):
        run(tmp_path / "out", steps=3)
    with record(tmp_path / "twice", resume=True) as found:
        arguments = {"steps": 2, "run": found}
        train(lambda s, b: (s, {"loss": b}), jnp.zeros(2), jnp.float32, **arguments)
        with pytest.raises(RunError, match="has been trained in already"):
            train(lambda s, b: (s, {"loss": b}), jnp.zeros(2), jnp.float32, **arguments)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_in_the_place_of_checkpoints_is_told_first(tmp_path, kind):
    out = tmp_path / "out"
    out.mkdir()
    place = out / "checkpoints"
    place.write_text("") if kind == "file" else place.symlink_to(tmp_path)
    with pytest.raises(RunError, match="is not of a run"):
        run(out)
