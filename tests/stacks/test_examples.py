"""The scripts of `examples/stacks/` against the real packages: the plan is within its budget, and
loss and gradients are the library's own.
"""

import importlib.util
import json
import runpy
import sys

import pytest

PACKAGES = {
    "equimo": "equimo",
    "gemma": "kauldron",
    "levanter": "levanter",
    "transformers": "transformers",
    "tunix": "tunix",
}
INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]


@pytest.mark.parametrize("name", INSTALLED)
def test_the_row_of_a_script(name, tmp_path, monkeypatch):
    out = tmp_path / "row.json"
    monkeypatch.setattr(sys, "argv", [name, "--out", str(out)])
    runpy.run_module(f"examples.stacks.{name}", run_name="__main__")
    row = json.loads(out.read_text())
    assert row["bytes of the plan"] <= row["budget"]
    assert row["loss over its own"] == pytest.approx(1, rel=1e-6)
    assert row["largest difference of a gradient"] < 1e-5
