"""A warning of jaxmem points at the user's own line."""

import warnings

import pytest

from jaxmem._core.warn import warn
from jaxmem.errors import JaxmemWarning

pytestmark = pytest.mark.core

DEEP = """
from jaxmem._core.warn import warn

def outer(depth):
    return outer(depth - 1) if depth else warn("careful")
"""


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_it_points_past_jaxmem_however_deep(depth):
    names: dict = {"__name__": "jaxmem._deep.module"}
    exec(compile(DEEP, "deep.py", "exec"), names)
    with pytest.warns(JaxmemWarning, match="careful") as said:
        names["outer"](depth)
    assert said[0].filename == __file__


def test_it_is_said_once_for_each_line_of_the_user():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        names: dict = {"__name__": "jaxmem._deep.module"}
        exec(compile(DEEP, "deep.py", "exec"), names)
        for _ in range(3):
            names["outer"](2)
        names["outer"](2)
    assert len(said) == 2


def test_a_call_from_no_module_of_ours_is_told_there():
    with pytest.warns(JaxmemWarning) as said:
        warn("here")
    assert said[0].filename == __file__
