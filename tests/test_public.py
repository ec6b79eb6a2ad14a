"""The public names: each is there, those that moved still answer, and importing costs no JAX."""

import importlib

import pytest

import jaxmem
from jaxmem.errors import JaxmemWarning

pytestmark = pytest.mark.core

MOVED = {
    "BudgetError": "jaxmem.errors",
    "LOSSLESS": "jaxmem.plans",
    "Target": "jaxmem.plans",
    "compress_residuals": "jaxmem.ops",
    "install": "jaxmem.plans",
    "softmax": "jaxmem.ops",
}


@pytest.mark.parametrize(("name", "address"), MOVED.items())
def test_a_name_that_moved_answers_with_its_new_address(name, address):
    with pytest.warns(JaxmemWarning, match=rf"jaxmem\.{name} is {address}\.{name} now") as said:
        found = getattr(jaxmem, name)
    assert found is getattr(importlib.import_module(address), name)
    assert said[0].filename == __file__, "it points at the line that uses the old name"
    assert name not in dir(jaxmem)


def test_what_is_not_there_is_told_with_what_is():
    with pytest.raises(AttributeError, match="no attribute 'optimise'; it has codecs, errors"):
        jaxmem.optimise  # noqa: B018
