"""Released steps with optax's transformations over a mesh: eight devices are one with the whole
batch, whatever is divided over them.
"""

import json
import subprocess
import sys

from tests.shared import children


def test_eight_devices_are_one_with_the_whole_batch():
    run = subprocess.run(
        [sys.executable, "-m", "tests.programs.sharded_direct"],
        env=children.with_cpus(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    got = json.loads(run.stdout.splitlines()[-1])
    assert got["devices"] == 8
    assert len(got["found"]) == 6
    for label, found in got["found"].items():
        # Relative to numbers of about 1.
        assert found["far"] <= 2e-6
        spec = "(None, 'data')" if "states" in label else "()"
        persist = int(label[-1])
        kinds = ["device"] * (persist > 0) + ["pinned_host"] * (persist < 4)
        assert found["places"] == [f"{kind} {spec}" for kind in kinds]
