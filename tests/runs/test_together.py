"""Several processes train, save, stop and go on together, and so do others in their place."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

from jaxmem._target.deviceless.process import child_environment
from jaxmem.errors import RunError
from jaxmem.runs import record, train
from tests.programs import durable_together
from tests.shared import children
from tests.shared.training import Stop, checkpoints, rows, unfinished

pytestmark = pytest.mark.jax_defaults
STEPS = 12
SECONDS = 90  # in which processes that train for moments have ended


def alone(out, stop=None, **given):
    """Trains in this process; the digest of the last state."""

    def batch(number):
        if number == stop:
            raise Stop
        return durable_together.batch(number)

    arguments = {"steps": STEPS, "save_every": 0, "keep": 3} | given
    # A fixture of the module has what the suite sets.
    with jax.enable_x64(False), record(out, resume=True) as run:
        step, first = durable_together.step, durable_together.first
        state = train(step, first, batch, run=run, **arguments)
        run.summary({"config": "alone"})
    return durable_together.digest(state)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run over one device: its rows, and its last state's digest."""
    out = tmp_path_factory.mktemp("whole") / "out"
    digest = alone(out)
    return rows(out), digest


class Together:
    """Processes of two devices each, which run the same lines."""

    def __init__(self, out, environments):
        port = children.free_port()
        outs = out if isinstance(out, list) else [out] * len(environments)
        self.running, self.readers, self.lines = [], [], [[] for _ in environments]
        for number, environment in enumerate(environments):
            env = child_environment(children.with_cpus(2)) | {"JAX_ENABLE_X64": "0"}
            line = [str(outs[number]), STEPS, number, len(environments), port]
            one = subprocess.Popen(
                [sys.executable, "-m", "tests.programs.durable_together", *map(str, line)],
                env=env | environment,
                stdout=subprocess.PIPE,  # to a file a process that may not write says nothing
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
            self.running.append(one)
            reads = functools.partial(self.lines[number].extend, one.stdout)
            self.readers.append(threading.Thread(target=reads))
            self.readers[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one, reader in zip(self.running, self.readers):
            one.kill()
            one.wait()
            reader.join()
            one.stdout.close()

    def said(self, number):
        return "".join(self.lines[number])

    def ends(self):
        """The last that each process has said."""
        return [self.said(number)[-3000:] for number in range(len(self.running))]

    def reaches(self, step):
        """Returns once the first process has told of a step."""
        end = time.monotonic() + SECONDS
        while f"step {step}\n" not in self.said(0):
            assert time.monotonic() < end, self.ends()
            time.sleep(0.02)

    def codes(self, seconds=SECONDS):
        """The exit codes, once all have ended; None for one that has not."""
        end = time.monotonic() + seconds
        for one, reader in zip(self.running, self.readers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, end - time.monotonic()))
                reader.join()
        return [one.poll() for one in self.running]

    def digests(self):
        """What all have printed at their end."""
        assert self.codes() == [0] * len(self.running), self.ends()
        last = [self.said(number).splitlines()[-1] for number in range(len(self.running))]
        return {line.removeprefix("digest ") for line in last}


def together(out, **environment):
    return Together(out, [environment, environment])


def test_a_signal_to_one_ends_all_and_one_process_goes_on(tmp_path, whole):
    out = tmp_path / "out"
    with together(out, PAUSE="0.1", SAVE_EVERY="1000") as running:
        running.reaches(3)
        running.running[1].send_signal(signal.SIGTERM)
        assert running.codes() == [143, 143], running.ends()
    path = unfinished(out)
    first, last = checkpoints(path)
    assert first == 0
    assert 3 < last < STEPS
    assert [row["step"] for row in rows(path)] == list(range(1, last + 1))
    manifest = json.loads((path / f"checkpoints/{last:08d}/manifest.json").read_text())
    assert any("process_1" in name for name in manifest["files"]), "both have written"
    assert alone(out) == whole[1]
    assert rows(out) == whole[0]


def test_a_state_is_read_over_other_devices_and_divided_otherwise(tmp_path):
    found = children.printed(children.with_cpus(4), "tests.programs.resharded", tmp_path, 5)
    assert found["compared"] > 100


@pytest.mark.slow
def test_a_state_is_read_over_all_other_devices(tmp_path):
    found = children.printed(children.with_cpus(4), "tests.programs.resharded", tmp_path)
    assert found["compared"] == 2 * found["ways"] ** 2


@pytest.mark.slow
@pytest.mark.parametrize("other", [{}, {"DIVIDE": "1", "KIND": "device"}])
def test_two_processes_go_on_where_one_stopped(tmp_path, whole, other):
    with pytest.raises(Stop):
        alone(tmp_path / "out", stop=6)
    with together(tmp_path / "out", **other) as running:
        assert running.digests() == {whole[1]}
    assert rows(tmp_path / "out") == whole[0]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_one_that_is_killed_ends_all_in_bounded_time_and_all_go_on(tmp_path, whole, killed):
    out = tmp_path / "out"
    with together(out, PAUSE="0.1") as running:
        running.reaches(4)
        running.running[killed].kill()
        codes = running.codes(60)
        assert codes[killed] == -signal.SIGKILL
        assert codes[1 - killed] not in (None, 0), running.said(1 - killed)[-3000:]
    assert not (out / "summary.json").exists()
    assert checkpoints(unfinished(out))[-1] >= 2  # that of the next step was being written
    with together(out) as running:
        assert running.digests() == {whole[1]}
    assert rows(out) == whole[0]


@pytest.mark.slow
@pytest.mark.parametrize("full", ["0", "1"])
def test_what_one_cannot_write_is_told_to_all(tmp_path, whole, full):
    out = tmp_path / "out"
    with together(out, FULL=full) as running:
        assert running.codes() == [1, 1], running.ends()
        for number in range(2):
            said = running.said(number).replace("\n", " ")
            assert "cannot write a checkpoint to" in said
            assert (f"process {full} of 2 failed" in said) == (str(number) != full)
    assert checkpoints(unfinished(out))[-1] in (2, 3)
    assert alone(out) == whole[1]
    assert rows(out) == whole[0]


@pytest.mark.slow
def test_all_leave_out_the_steps_whose_losses_are_not_finite(tmp_path, monkeypatch):
    given = {"WORSE": "5,6", "SAVE_EVERY": "1000"}
    with together(tmp_path / "out", **given) as running:
        digests = running.digests()
    monkeypatch.setenv("WORSE", "5,6")
    assert digests == {alone(tmp_path / "alone", save_every=1000)}
    assert rows(tmp_path / "out") == rows(tmp_path / "alone")
    assert [row["step"] for row in rows(tmp_path / "out") if row.get("skipped")] == [5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["0", "1"])
def test_what_fails_in_one_ends_all_in_bounded_time(tmp_path, whole, fails):
    with together(tmp_path / "out", FAILS=fails) as running:
        codes = running.codes(60)
        assert all(code not in (None, 0) for code in codes), codes
        assert "ValueError: no batch here" in running.said(int(fails))
    assert alone(tmp_path / "out") == whole[1]


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_told_in_all(tmp_path):
    outs = [tmp_path / "a", tmp_path / "b"]
    with together(outs, SHOWN="1") as running:
        assert running.codes() == [1, 1]
        for number in range(2):
            said = running.said(number)
            assert "expected a folder that all processes of the run share" in said, said[-3000:]
    assert not any(out.exists() and any(out.iterdir()) for out in outs)


def test_a_rectifier_decides_in_one_process_alone(tmp_path):
    step, first = durable_together.step, durable_together.first
    with record(tmp_path, resume=True) as run:
        run.processes.count = 2
        with pytest.raises(RunError, match="got a rectifier in 2 processes, which would decide"):
            train(step, first, None, steps=1, run=run, rectifier=1)
        run.processes.count = 1
    assert os.listdir(tmp_path) == []
