"""Arrays whose types say how devices share them: each device runs an operation on its own part, and
the results are those of whole arrays.
"""

import json
import subprocess
import sys

from tests.shared import children


def test_parts_give_what_whole_arrays_give():
    command = [sys.executable, "-m", "tests.kernels.typed"]
    environment = children.with_cpus(8)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6 * 4
    assert [row for row in rows if not row["equal"] or row["parts"] != 8] == []
