"""One of two processes is killed, or the network between two processes is cut: both end with a
message, no saved step is lost, and the run resumes. A reduced form of `benchmarks/processes.py`.
"""

import pytest

from benchmarks import processes
from benchmarks.faults import is_same
from tests.shared.pair import Network, networks

pytestmark = [pytest.mark.jax_defaults, pytest.mark.slow]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run without faults, and its seconds."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, processes.seconds_of(out)


def ended(row, count):
    """Whether `count` processes ended in time after a fault, each with a message."""
    assert len(row["seconds"]) == len(row["said"]) == count
    assert all(seconds is not None and seconds <= 60 for seconds in row["seconds"].values()), row
    assert None not in row["said"].values(), row
    assert row["lost"] == 0


def test_a_run_whose_processes_are_killed_loses_nothing(tmp_path, whole):
    out, seconds = tmp_path / "out", whole[1]
    for killed in range(2):

        def fault(pair, killed=killed):
            pair.running[killed].kill()
            return {1 - killed}

        row = processes.stopped(out, 0.4 * seconds, fault, None)
        ended(row, 1)
        assert row["codes"][killed] == -9
    processes.seconds_of(out)
    assert is_same(out, whole[0])


def test_a_run_whose_network_is_cut_loses_nothing(tmp_path, whole):
    if not networks():
        pytest.skip("this machine allows no network namespaces")
    out, seconds = tmp_path / "out", whole[1]

    def fault(_):
        network.cut(*processes.CUTS_OF["all packets lost"])
        return {0, 1}

    with Network() as network:
        ended(processes.stopped(out, 0.5 * seconds, fault, network), 2)
        network.mend()
        processes.seconds_of(out, network)
    assert is_same(out, whole[0])
