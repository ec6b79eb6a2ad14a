"""Versions are read as numbers, release candidates included."""

import pytest

from jaxmem._core.versions import installed, release


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.12.0", (0, 12, 0)),
        ("0.12.0rc1", (0, 12, 0)),
        ("0.12.0.1", (0, 12, 0, 1)),
        ("0.11.2.dev20260101+abc", (0, 11, 2)),
        ("1!2.0.post3", (2, 0, 0)),
        ("v3", (3, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_a_version_is_its_numbers(text, numbers):
    assert release(text) == numbers


def test_what_is_not_installed_has_none():
    assert installed("jax") is not None
    assert installed("no-such-package-of-this-name") is None
