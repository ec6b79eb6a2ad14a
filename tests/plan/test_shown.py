"""A plan as plain text and as HTML, and what differs between two plans."""

import html.parser
import json

import pytest

from jaxmem._core.actions import KEEP
from jaxmem._result.plan.difference import difference
from tests.shared.plans import CODEC, WHY, other, plan

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.012, ": 2.00 ms more, ± 0.50 ms"),
        (0.009, ": 1.00 ms less, ± 0.50 ms"),
        (0.0104, ": equal as far as is known, ± 0.50 ms"),
        (0.0096, ": equal as far as is known, ± 0.50 ms"),
    ],
)
def test_times_are_told_beside_those_of_everything_kept_as_far_as_they_are_known(seconds, said):
    told = plan(predicted_seconds=seconds, uncertain_seconds=5e-4, baseline_source="xla")
    line = str(told).splitlines()[5]
    start = f"step {1e3 * seconds:.2f} ms as predicted, everything kept 10.00 ms (XLA's estimate)"
    assert line.startswith(start + said)


def test_a_plan_that_keeps_everything_has_one_time():
    kept = plan(actions={"block": {"*": KEEP}}, baseline_source="measured")
    assert str(kept).splitlines()[5] == "step with everything kept 10.00 ms (measured); 3 compiles"


class Table(html.parser.HTMLParser):
    """Reads the cells of a table, and whether every element is closed in its turn."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.cells, self.below = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag != "br":
            self.open.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.cells[-1] += data
        elif self.open[-1] == "p":
            self.below += data + "\n"


def test_a_notebook_shows_the_same_table():
    made = plan(notes=("<script>alert(1)</script>",))
    text = made._repr_html_()
    assert "<script>" not in text
    read, plain = Table(text), str(made).splitlines()
    assert read.cells[:8] == plain[0].split()
    assert read.cells[16:] == [
        "up", "linear", "compress", "grouped_symmetric", "1.5 KiB", "512 B", "0.250", WHY,
    ]  # fmt: skip
    assert read.below.splitlines() == plain[3:]


def test_the_difference_of_equal_plans_is_none():
    same = difference(plan(), plan(profile_seconds=7.0))
    assert str(same) == "the plans are the same"
    assert same.to_json() == {"figures": {}, "seconds_comparable": True, "actions": {}}


def test_the_difference_names_figures_and_tags():
    found = difference(plan(), other())
    assert str(found).splitlines() == [
        "budget_bytes: 10.0 MiB -> 8.0 MiB (-2,097,152 bytes)",
        "time_source: roofline -> measured",
        "microbatches: - -> 4",
        "predicted_seconds: 12.000 ms -> 13.000 ms, by other means: not to be compared",
        "block/h: keep -> recompute",
        "block/new: not in the plan -> offload",
    ]
    comparable = difference(plan(), plan(predicted_seconds=0.0135, actions={"block": {"*": "x"}}))
    assert (
        str(comparable).splitlines()[0] == "predicted_seconds: 12.000 ms -> 13.500 ms (+1.500 ms)"
    )
    assert f"block/up: compress {CODEC} -> not in the plan" in str(comparable)
    assert "block/all that no tag names: not in the plan -> x" in str(comparable)


def test_the_difference_as_json():
    data = json.loads(json.dumps(difference(plan(), other()).to_json()))
    assert data["figures"]["budget_bytes"] == [10 * 2**20, 8 * 2**20]
    assert data["figures"]["microbatches"] == [None, 4]
    assert data["seconds_comparable"] is False
    assert data["actions"] == {"block": {"h": ["keep", "recompute"], "new": [None, "offload"]}}
