"""docs/: each model runs before and after its five changed lines, to the same loss; the examples of
the other pages run as they stand.
"""

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


def run(name: str) -> dict:
    """What a page's Python blocks define, run one after the other."""
    found: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S):
        exec(compile(block, name, "exec"), found)
    return found


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


@pytest.mark.jax_defaults
def test_the_tutorial_is_shown_as_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = run("tutorial.md")
    assert found["plan"].compiled_bytes <= 24 * 2**20 < found["plan"].baseline_bytes / 2
    assert found["losses"][-1] < found["losses"][0] - 2, "it learns"
    assert int(found["restored"].step) == 41
    assert float(found["value"]) < found["losses"][0] - 2, "the restored state goes on"
    assert "evaluation takes" in capsys.readouterr().out


@pytest.mark.jax_defaults
def test_the_stack_is_shown_as_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = run("stack.md")
    assert found["plan"].compiled_bytes <= 200e6
    (m, v) = found["moments"]["w"]
    assert m.shape == v.shape == (3, 16, 16)
    assert float(abs(m).max()) > 0
    assert float(v.min()) >= 0


@pytest.mark.jax_defaults
def test_adama_is_shown_as_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = run("adama.md")
    assert found["plan"].microbatches == 1, "everything fits"
    assert int(found["state"][1].count) == 3
    assert np.isfinite(found["metrics"]["loss"])


def test_what_the_docs_point_to_is_there():
    for text in (p.read_text() for p in DOCS.glob("*.md")):
        for path in re.findall(r"`((?:benchmarks|configs|experiments)/[\w/.]+)`", text):
            assert (DOCS.parent / path).exists(), path
