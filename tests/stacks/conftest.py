"""Tests of packages that are installed in an environment of their own (`make stacks`): where they
are not, their files are not collected. Their tests are slow, and the packages warn.
"""

import importlib.util

import pytest

NEEDS = {
    "test_grain.py": "grain",
    "test_maxtext.py": "maxtext",
    "test_maxtext_flags.py": "maxtext",
    "test_tunix.py": "tunix",
}
collect_ignore = [
    file for file, package in NEEDS.items() if importlib.util.find_spec(package) is None
]
MARKS = (
    pytest.mark.slow,
    pytest.mark.jax_defaults,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("default"),
)


def pytest_itemcollected(item):
    for mark in MARKS:
        item.add_marker(mark)
