"""What the tests of the loop compare with."""

import pytest

from tests.shared.training import rows, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 8 steps: its rows and its last state's digest."""
    out = tmp_path_factory.mktemp("whole") / "out"
    digest = run(out)
    return rows(out), digest
