"""Programs here are compiled often and run briefly: XLA's costly passes are left out, unless a test
asks for them.
"""

import os
import sys

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compiles):
    return


@pytest.fixture
def optimized(quickly):
    """Programs as a user's are compiled."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def child_paths(tmp_path, monkeypatch):
    """Child processes find the packages, installed or not, and the part that is written here."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.syspath_prepend(str(tmp_path))
