"""Configs: the committed ones are valid, and every mistake is told with file, key, value and what
is allowed.
"""

import pytest

from experiments.command.load import load, parse_override
from experiments.errors import InputError


def test_mistakes_of_several_keys_are_told_at_once():
    """Each by its key, its value and its source. tests/experiments/command/test_wrong.py and
    test_bad_configs.py try every key.
    """
    with pytest.raises(InputError) as caught:
        load("gpt_nano", ["model.layers=0", "train.batch=x"])
    found = str(caught.value)
    assert found.count("override") == len(found.splitlines()) == 2
    assert "model.layers: got 0" in found
    assert "train.batch: got 'x'" in found


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a.b=5", ("a.b", 5)),
        ("a.b=1e-4", ("a.b", 1e-4)),
        ("a.b=true", ("a.b", True)),
        ("a.b=no", ("a.b", "no")),
        ("a.b='12GiB'", ("a.b", "12GiB")),
        ("a.b=12GiB", ("a.b", "12GiB")),
        ("a.b=/x/y=z.json", ("a.b", "/x/y=z.json")),
        ("a.b=['keep', 'offload']", ("a.b", ["keep", "offload"])),
        ("a.b = 5", ("a.b", 5)),
        ("a.b=1\nc=2", ("a.b", "1\nc=2")),
    ],
)
def test_overrides_are_toml_values_or_else_texts(text, parsed):
    assert parse_override(text) == parsed


def test_overrides_win_and_make_sections():
    config = load("gpt_nano", ["train.steps=39", "plan.budget=64MiB", "sample.length=7"])
    found = config.train.steps, config.plan.budget, config.sample.length
    assert found == (39, "64MiB", 7)
