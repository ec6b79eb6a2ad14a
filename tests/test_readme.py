"""The README's Python blocks run as they stand, one after the other; the first one is short."""

import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


@pytest.mark.jax_defaults
@pytest.mark.core
def test_the_examples_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(BLOCKS) == 4
    names: dict = {}
    here, there = [], []  # the plan of the first block, and that of the second
    for block, found in zip(BLOCKS, (here, there, [], [])):
        exec(compile(block, str(README), "exec"), names)
        found.append(names["plan"])
    printed = capsys.readouterr().out
    assert "of a budget of 100.0 MiB" in printed
    for (plan,), target in ((here, "local"), (there, "h200")):
        assert plan.target == target
        assert 0 < plan.compiled_bytes <= plan.budget_bytes < plan.baseline_bytes / 2
        assert f"everything kept: {plan.baseline_bytes / 2**20:.1f} MiB" in str(plan)
    assert f"{there[0].compiled_bytes} {there[0].host_bytes}" in printed
    model = names["stack"](here[0])
    assert model.init(jax.random.key(0), jax.numpy.zeros((2, 4, 8)), None)["params"]
    assert names["metrics"]["skipped_layers"].shape == (8,)
    assert jax.numpy.isfinite(names["metrics"]["loss"])


@pytest.mark.core
def test_the_first_example_fits_in_20_lines():
    assert len(BLOCKS[0].splitlines()) <= 20
    assert "print(plan)" in BLOCKS[0]
