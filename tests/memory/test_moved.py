"""The table of what a step moves to host memory and back."""

import pytest

from jaxmem._result.memory.moved import table
from tests.shared.explanations import MOVED, made_explanation

pytestmark = pytest.mark.core


def test_the_table_has_a_sum_for_each_direction():
    assert table(MOVED) == [
        "moved in a step, and the share of it beside matrix products:",
        "  to the device  beside  how and what",
        "       30.0 MiB    100%  by DMA, in loops  offloaded: up",
        "       10.0 MiB      0%  by kernels, once  params['layers']",
        "       40.0 MiB     75%  together",
        " to host memory  beside  how and what",
        "       30.0 MiB     50%  by DMA, in loops  offloaded: up",
        "       30.0 MiB     50%  together",
    ]
    assert "\n".join(table(MOVED)) in str(made_explanation())


def test_what_moves_nothing_has_no_table():
    assert table(()) == []
    assert "moved in a step" not in str(made_explanation(transfers=()))
    assert "to host memory" not in "\n".join(table(MOVED[:2]))
