"""A signal ends a run with what it has saved, and a killed process loses no more than what it had
not.
"""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxmem._target.deviceless.process import child_environment
from jaxmem.runs import Interrupted
from tests.programs import durable_run
from tests.shared import children
from tests.shared.training import checkpoints, rows, run, unfinished


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
