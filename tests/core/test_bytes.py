"""Budgets as people write them."""

import decimal
import fractions
import sys

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem._core.bytes import parse_budget, show_bytes
from jaxmem.errors import BudgetError

READ = {
    "512": 512,
    "1KiB": 1024,
    "1.5 kib": 1536,
    "2kB": 2000,
    "12GiB": 12 * 2**30,
    "12Gi": 12 * 2**30,
    "12G": 12 * 10**9,
    "3 GB": 3 * 10**9,
    "800mb": 800 * 10**6,
    "2T": 2 * 10**12,
    "2TiB": 2**41,
    "7b": 7,
    ".5MiB": 2**19,
    "1.GB": 10**9,
    "1e6": 10**6,
    "1.5e9": 1_500_000_000,
    "1e3 kB": 10**6,
    "1e-3GB": 10**6,
    "1_000_000": 10**6,
    "1_024 KiB": 2**20,
    "9007199254740993": 2**53 + 1,
    "90%": 900,
    " 12.5 % ": 125,
    "100%": 1000,
    "\t4 MiB\n": 4 * 2**20,
    "4\u00a0MiB": 4 * 2**20,
}


@pytest.mark.parametrize("text", READ)
def test_read(text):
    assert parse_budget(text, 1000) == READ[text]


@pytest.mark.parametrize(
    ("number", "count"),
    [
        (None, 1000),
        (512, 512),
        (512.9, 512),
        (2**53 + 1, 2**53 + 1),
        (sys.maxsize, sys.maxsize),
        (np.int32(5), 5),
        (np.uint64(2**63 - 1), 2**63 - 1),
        (np.float32(5.5), 5),
        (np.float64(1e9), 10**9),
        (jnp.asarray(7, jnp.int32), 7),
        (fractions.Fraction(7, 2), 3),
    ],
)
def test_numbers(number, count):
    assert parse_budget(number, 1000) == count


REFUSED = [
    "", " ", "GiB", "%", "1 2", "12 QB", "-3", "-1GiB", "+3", "1e9x", "0", "0.0 GiB", "0%",
    "-5%", "101%", "nan", "inf", "-inf", "Infinity GiB", "1e999", "1e9999999999", "0.4", "1e-9%",
    "0x10", "12 GiB GiB", "1__0", "_1", "1_", "1._5", "12GiB/s", "９０％", "１２", "٣", "²", "1²",
    "12\u212a", "12,5GB", "1,000,000", "12 gigs", "half", "1\x00", "9e18KB",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refused_texts(text):
    message = r"`budget` is .*expected a positive number of bytes"
    with pytest.raises(BudgetError, match=message) as e:
        parse_budget(text, 1000)
    assert repr(text) in str(e.value)
    assert e.value.least_bytes is None


@pytest.mark.parametrize(
    "value",
    [
        *[True, False, -1, 0, 0.0, 0.5, -0.0, float("inf"), float("-inf"), float("nan"), 2**63],
        *[10**400, 1e300, (), {}, [1], b"1", np.bool_(True), np.float32("nan"), np.array([1]), 1j],
        *[decimal.Decimal("nan"), object],
    ],
    ids=repr,
)
def test_refused_values(value):
    with pytest.raises(BudgetError, match=r"`host_budget` is .*expected a positive number"):
        parse_budget(value, 1000, "host_budget")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("12 gigs", "did you mean '12GiB' or '12GB'?"),
        ("12GX", "did you mean '12GiB' or '12GB'?"),
        ("1,000,000", "did you mean '1_000_000'?"),
        ("1'000'000", "did you mean '1_000_000'?"),
        ("12,5GB", "did you mean '12.5GB'?"),
        ("1 000 000", "did you mean '1000000'?"),
        ("１２GiB", "did you mean '12GiB'?"),
        ("９０％", "did you mean '90%'?"),
        ("101%", "more than all of the usable memory"),
        ("0", "less than a byte"),
        (0, "less than a byte"),
        (-1, "less than a byte"),
        ("1e999", "more than 8388608.0 TiB"),
        (2**63, "more than 8388608.0 TiB"),
    ],
)
def test_what_was_meant_is_suggested(text, hint):
    with pytest.raises(BudgetError) as error:
        parse_budget(text, 1000)
    assert f"`budget` is {text!r}" in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize("text", ["half", "", "-3", "nan", "GiB", True, (), "0x10", "1__0"])
def test_nothing_is_suggested_without_an_idea(text):
    with pytest.raises(BudgetError, match=r"^`plan.budget` is [^?]*; expected"):
        parse_budget(text, 1000, "plan.budget")


texts = st.text(max_size=12) | st.text("0123456789.,_eE+-% kKmMgGtTiIbB²１", max_size=9)


@hypothesis.given(texts)
def test_a_text_is_read_or_refused(text):
    try:
        count = parse_budget(text, 10**9)
    except BudgetError as error:
        if ": did you mean " in str(error):  # what is suggested is read
            suggested = str(error).partition(": did you mean ")[2].partition("?;")[0]
            assert all(parse_budget(s.strip("'"), 10**9) for s in suggested.split(" or "))
    else:
        assert 1 <= count < 2**63
        assert text.isascii()


sizes = st.integers(1, 2**50 - 1) | st.integers(0, 49).map(lambda power: 2**power)


@hypothesis.given(sizes)
def test_what_is_shown_is_read_again(size):
    unit = 1024 ** (min(len(f"{size:b}") - 1, 49) // 10)
    assert abs(parse_budget(show_bytes(size), 1) - size) <= max(0.06 * unit, 0.5)


@hypothesis.given(sizes, sizes)
def test_more_is_never_shown_as_less(a, b):
    less, more = sorted((a, b))
    assert parse_budget(show_bytes(less), 1) <= parse_budget(show_bytes(more), 1)
