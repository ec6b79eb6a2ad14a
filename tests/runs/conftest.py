"""What the tests of the loop compare with, and the plans that those of rectifiers begin with."""

import pytest

from tests.shared.rectified import ASKED, planned
from tests.shared.training import rows, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 8 steps: its rows and its last state's digest."""
    out = tmp_path_factory.mktemp("whole") / "out"
    digest = run(out)
    return rows(out), digest


@pytest.fixture(scope="module")
def kept():
    """The plan that keeps everything of the step whose outliers change."""
    return planned(None)


@pytest.fixture(scope="module")
def plan(kept):
    """One that compresses, with room for two outliers."""
    return planned(int(0.8 * kept.baseline_bytes), **ASKED)
