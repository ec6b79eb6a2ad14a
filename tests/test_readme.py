"""The README's Python blocks run as they stand, one after the other."""

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.jax_defaults
@pytest.mark.core
def test_the_examples_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "gelu" in printed
    assert "of a budget of 180.0 MiB" in printed
    assert names["metrics"]["skipped_layers"].shape == (8,)
    plan = names["plan"]
    assert 0 < plan.compiled_bytes <= plan.budget_bytes
    assert names["stack"](plan).init(jax.random.key(0), jax.numpy.zeros((2, 4, 8)), None)["params"]
