"""docs/adopting.md: each model runs before and after its changed lines, which are five, and steps to the same loss."""

import pathlib
import re

import numpy as np
import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
DIFFS = re.findall(r"## (\w+)[^\n]*\n\n```diff\n(.*?)```", (DOCS / "adopting.md").read_text(), re.S)


def side(diff: str, gone: str) -> str:
    """The program on one side of a diff: without the lines marked `gone`."""
    lines = [line for line in diff.splitlines() if not line.startswith(gone)]
    return "\n".join(line[1:] for line in lines)


def test_every_way_is_shown():
    assert [name for name, _ in DIFFS] == ["Linen", "NNX", "Plain"]


@pytest.mark.core
@pytest.mark.jax_defaults
@pytest.mark.parametrize(("name", "diff"), DIFFS)
def test_five_changed_lines_plan_a_model(name, diff, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert all(line[:1] in " +-" for line in diff.splitlines())
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 5
    before, after = {}, {}
    exec(compile(side(diff, "+"), f"{name}, before", "exec"), before)
    exec(compile(side(diff, "-"), f"{name}, after", "exec"), after)
    assert np.isfinite(before["value"])
    np.testing.assert_allclose(after["value"], before["value"], rtol=1e-5)


def test_what_the_docs_point_to_is_there():
    for text in (p.read_text() for p in DOCS.glob("*.md")):
        for path in re.findall(r"`((?:benchmarks|configs|experiments)/[\w/.]+)`", text):
            assert (DOCS.parent / path).exists(), path
