"""A compiler for an H200, one for each file of tests that asks for it."""

import pytest

from jaxmem._target.deviceless.compiler import Compiler


@pytest.fixture(scope="module")
def h200():
    with Compiler("h200", workers=1) as compiler:
        yield compiler
