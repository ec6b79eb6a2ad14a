"""Budgets as people write them."""

import pytest

import jaxmem
from jaxmem._core.bytes import parse_budget, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (None, 1000), (512, 512), (512.9, 512), ("512", 512), ("1KiB", 1024), ("1.5"
                                                                               " kib", 1536), ("2kB", 2000), ("12GiB", 12 * 2**30),
        ("3 GB", 3 * 10**9), ("90%", 900), (" 12.5 %"
                                            " ", 125), ("100%", 1000), ("7b", 7), (".5MiB", 2**19),
    ],
)  # fmt: skip
def test_read(text, count):
    assert parse_budget(text, 1000) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "1 2",
        "12 GX",
        "-3",
        "1e9x",
        "0",
        "0%",
        "101%",
        "nan",
        True,
        False,
        -1,
        0.0,
        float("inf"),
        (),
        {},
        b"1",
    ],
)
def test_refused(text):
    with pytest.raises(jaxmem.errors.BudgetError, match="`budget` is .*expected"):
        parse_budget(text, 1000)


def test_shown():
    assert [show_bytes(n) for n in (5, 1536, 3 * 2**20, 5 * 2**40)] == [
        "5 B",
        "1.5 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]
