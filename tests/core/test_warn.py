"""A warning of jaxmem points at the user's own line."""

import warnings

import pytest

from jaxmem._core.warn import warn
from jaxmem.errors import JaxmemWarning

DEEP = """
from jaxmem._core.warn import warn

def outer(depth):
    return outer(depth - 1) if depth else warn("careful")
"""


def outer():
    names: dict = {"__name__": "jaxmem._deep.module"}
    exec(compile(DEEP, "deep.py", "exec"), names)
    return names["outer"]


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_it_points_past_jaxmem_however_deep(depth):
    deep = outer()
    with pytest.warns(JaxmemWarning, match="careful") as said:
        deep(depth)
    assert said[0].filename == __file__


def test_it_is_said_once_for_each_line_of_the_user():
    deep = outer()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            deep(2)
        deep(2)
    assert len(said) == 2


def test_a_call_from_no_module_of_ours_is_told_there():
    with pytest.warns(JaxmemWarning) as said:
        warn("here")
    assert said[0].filename == __file__
