"""The README's Python blocks run as they stand, one after the other; the first one is short."""

import pathlib
import re

import jax
import pytest

from tests.shared.marks import slow

README = pathlib.Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)


@pytest.mark.jax_defaults
@pytest.mark.core
@pytest.mark.parametrize("times", ["computed_times", slow("measured_times")])
def test_the_examples_run(times, capsys, tmp_path, monkeypatch, request):
    """As a user has them in the slow tier: there, steps and pieces of them are run to be timed."""
    request.getfixturevalue(times)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) == 5
    names: dict = {}
    plans = []
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), names)
        plans.append(names["plan"])
    here, verified, there = plans[:3]
    assert times == "computed_times" or here.time_source == "measured"
    printed = capsys.readouterr().out
    assert "of a budget of 100.0 MiB" in printed
    for plan, target in ((here, "local"), (verified, "local"), (there, "h200")):
        assert plan.target == target
        assert 0 < plan.compiled_bytes <= plan.budget_bytes < plan.baseline_bytes / 2
        assert f"everything kept: {plan.baseline_bytes / 2**20:.1f} MiB" in str(plan)
    assert f"{there.compiled_bytes} {there.host_bytes}" in printed
    assert (verified.actions, verified.compiled_bytes) == (here.actions, here.compiled_bytes)
    by_names = plans[3]
    assert {row.tag for row in by_names.rows} == {"up", "gelu"}
    assert 0 < by_names.compiled_bytes <= by_names.budget_bytes < by_names.baseline_bytes / 2
    fitted = names["trainer"].plan
    assert 0 < fitted.compiled_bytes <= fitted.budget_bytes == 64 * 2**20 < fitted.baseline_bytes
    assert names["metrics"]["skipped_layers"].shape == (8,)
    assert jax.numpy.isfinite(names["metrics"]["loss"])
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(names["state"])}
    assert ("pinned_host" in kinds) == (not fitted.places.resident)


@pytest.mark.core
def test_the_first_example_fits_in_20_lines():
    assert len(BLOCKS[0].splitlines()) <= 20
    assert "print(plan)" in BLOCKS[0]
