"""Marks parameters of tests that only `make test-slow` runs."""

import functools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
