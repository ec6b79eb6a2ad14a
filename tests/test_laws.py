"""tests/LAWS.md and tests/costly.txt name tests that exist. `make test` runs a test of each law."""

import ast
import functools
import pathlib
import re

import pytest

from tests.shared.marks import FOLDERS

HERE = pathlib.Path(__file__).parent
COSTLY = (HERE / "costly.txt").read_text("utf-8").splitlines()
ROWS = [
    line.strip("|").split("|")
    for line in (HERE / "LAWS.md").read_text("utf-8").splitlines()
    if "::" in line and line.count("|") == 4
]


@functools.cache
def defined_in(path: str) -> dict[str, bool]:
    """The tests of a file, and whether all variants of each are slow."""
    return {
        node.name: any(ast.unparse(d) == "pytest.mark.slow" for d in node.decorator_list)
        for node in ast.parse((HERE / path).read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def named(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)::(\w+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_law_has_a_quick_test_and_names_tests_that_exist(row):
    _, quick, variants = row
    assert named(quick)
    assert quick.count("::") == len(named(quick))
    for path, test in named(quick) + named(variants):
        assert test in defined_in(path), f"{path}::{test}"
    assert not [test for path, test in named(quick) if defined_in(path)[test]], "they are slow"
    cheap = [test for path, test in named(quick) if f"{path}::{test}" not in COSTLY]
    assert cheap, "all are costly"


def test_costly_tests_exist_and_are_not_slow():
    names = [name.partition("[")[0].split("::") for name in COSTLY]
    assert [f"{path}::{test}" for path, test in names if defined_in(path).get(test, True)] == []


def test_folders_with_marks_exist():
    names = [name.removeprefix("-") for names in FOLDERS.values() for name in names.split()]
    assert [name for name in names if not (HERE / name).exists()] == []


def test_there_are_laws_of_every_room():
    assert len(ROWS) > 80
    text = (HERE / "LAWS.md").read_text("utf-8")
    rooms = [p.parent.name for p in (HERE.parent / "jaxmem").glob("_*/__init__.py")]
    assert [room for room in rooms if f"`{room}`" not in text] == []
