"""An experiment in two processes: it has the losses of one process, it ends as a whole, and other
processes and devices resume it.
"""

import json
import signal

import pytest

from tests.shared.pair import MESH, Pair, alone, one_place
from tests.shared.training import rows, unfinished

pytestmark = [pytest.mark.jax_defaults, pytest.mark.slow]


def losses(out):
    return [row["loss"] for row in rows(out)]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The losses of four devices in one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    alone(out, 4, text, *MESH)
    return losses(out)


@pytest.mark.parametrize("plan", [(), ("plan.budget=500KB", "plan.actions=lossless")])
def test_two_processes_are_one_with_as_many_devices_bit_for_bit(text, tmp_path, whole, plan):
    """XLA's all-reduce over two devices adds two numbers, in whatever order."""
    out = tmp_path / "out"
    with Pair(out, text, *MESH, *plan) as running:
        assert running.codes() == [0, 0], running.said(0)[-3000:] + running.said(1)[-3000:]
        assert "step 10/10" in running.said(0)
        assert "step 10/10" not in running.said(1)
    assert losses(out) == whole
    assert json.loads((out / "summary.json").read_text("utf-8"))["steps"] == 10
    assert (out / "report.html").exists() == bool(plan)


@pytest.mark.parametrize("mesh", ["mesh.data=4", "mesh.fsdp=4"])
def test_sums_of_four_terms_are_added_in_one_order_by_one_process_and_by_two(text, tmp_path, mesh):
    """gloo adds the terms of more than two devices in another order than XLA within a process; one
    process may use gloo too.
    """
    with Pair(tmp_path / "two", text, mesh) as running:
        assert running.codes() == [0, 0], running.said(0)[-3000:] + running.said(1)[-3000:]
    alone(tmp_path / "one", 4, text, mesh, *one_place())
    assert losses(tmp_path / "one") == losses(tmp_path / "two")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_run_is_resumed_on_other_devices(text, tmp_path, whole, killed):
    """Issue: fsdp = 2 and tensor = 2 in two processes, then two devices in one process."""
    out = tmp_path / "out"
    with Pair(out, text, *MESH, PAUSE="0.3") as running:
        running.reaches(5)
        running.running[killed].kill()
        codes = running.codes(60)
        assert codes[killed] == -signal.SIGKILL
        assert codes[1 - killed] not in (None, 0), running.said(1 - killed)[-3000:]
    done = losses(unfinished(out))
    assert 4 <= len(done) < 10
    alone(out, 2, text, "mesh.fsdp=2")
    got = losses(out)
    assert got[: len(done) - 2] == whole[: len(done) - 2], "the rows of two processes"
    assert got == pytest.approx(whole, rel=1e-6)


def test_a_mixture_of_experts_is_resumed_under_a_plan_on_other_devices(text, tmp_path):
    experts = "model.experts=4", "mesh.expert=2"
    alone(tmp_path / "whole", 4, text, *experts, "mesh.data=2")
    whole, out = losses(tmp_path / "whole"), tmp_path / "out"
    with Pair(out, text, *experts, "mesh.data=2", PAUSE="0.3") as running:
        running.reaches(5)
        running.running[1].kill()
        assert None not in running.codes(60)
    assert 4 <= len(losses(unfinished(out))) < 10
    alone(out, 2, text, *experts, "plan.budget=1MB", "plan.actions=lossless")
    assert losses(out) == pytest.approx(whole, rel=1e-5)
    assert (out / "plan.json").exists()


@pytest.mark.parametrize("fails", ["0", "1"])
def test_an_error_in_one_process_ends_all_with_its_cause(text, tmp_path, fails):
    with Pair(tmp_path / "out", text, *MESH, FAILS=fails) as running:
        running.reaches(2)
        assert running.codes(60) == [1, 1], running.said(0)[-3000:] + running.said(1)[-3000:]
        for number in range(2):
            last = [x for x in running.said(number).splitlines() if x.startswith("error:")][-1]
            assert f"process {fails} of 2: ValueError: no batch here" in last


def test_a_signal_to_one_process_ends_all_and_both_resume(text, tmp_path, whole):
    out = tmp_path / "out"
    with Pair(out, text, *MESH, PAUSE="0.3") as running:
        running.reaches(3)
        running.running[1].send_signal(signal.SIGTERM)
        assert running.codes() == [143, 143], running.said(0)[-3000:]
    with Pair(out, text, *MESH) as running:
        assert running.codes() == [0, 0], running.said(0)[-3000:]
    assert losses(out) == whole
