"""Every wrong command line ends in one message and exit code 2, and leaves every file as it is."""

import re

import pytest

from tests.shared.command import listing, run
from tests.shared.wrong_lines import WRONG_LINES

pytestmark = pytest.mark.jax_defaults


@pytest.mark.parametrize(
    ("line", "message"), WRONG_LINES, ids=[line or "nothing" for line, _ in WRONG_LINES]
)
def test_a_wrong_line_is_told(line, message, folder, capsys):
    before = listing(folder)
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert re.search(message, err, re.DOTALL), err
    assert "Traceback" not in out + err
    assert out == ""
    assert listing(folder) == before
