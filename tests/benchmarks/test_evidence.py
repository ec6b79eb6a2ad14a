"""docs/evidence.md: its numbers are the results', and its words follow from the goals."""

import re

import pytest

from benchmarks.shared import evidence


def test_the_page_is_what_the_results_say():
    assert evidence.PAGE.read_text("utf-8") == evidence.page()


def test_every_claim_has_a_number_or_a_reason():
    for claim in evidence.rows():
        assert ("value" in claim) != ("missing" in claim), claim["claim"]
        assert claim["number"] is not None or claim["outcome"].startswith("not "), claim["claim"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["a", "x y"], [1]),
        (["a", "*"], [1, 2]),
        (["*", "x*"], [1, 3]),  # "c" has no such key
        (["b", "list", "1"], [5]),
        (["b", "list", "*"], [4, 5]),
        (["a", "nothing"], []),
    ],
)
def test_values_are_found_by_keys_and_patterns(keys, expected):
    found = {"a": {"x y": 1, "z": 2}, "b": {"xx": 3, "list": [4, 5]}, "c": 6}
    assert list(evidence.values(found, keys)) == expected


@pytest.mark.parametrize(
    ("better", "goal", "found", "word"),
    [
        ("more", 2.0, 2.2, "passed"),
        ("more", 2.0, 2.01, "met"),
        ("more", 2.0, 1.5, "short by 25 %"),
        ("less", 2.0, 1.5, "passed"),
        ("less", 2.0, 2.0, "met"),
        ("less", 0.0, 0.0, "met"),
        ("less", 2.0, 2.01, "short by 0.5 %"),
        ("nearer 0", 0.5, -0.4, "passed"),
        ("more", 0.5, -0.3, "short: of the other sign"),
        ("nearer 0", 0.5, -0.6, "short by 20 %"),
    ],
)
def test_the_outcome_follows_from_the_goal(better, goal, found, word):
    claim = {"goal": goal, "better": better}
    assert evidence.outcome(claim, found).replace("*", "") == word


def test_a_number_that_a_result_lacks_is_an_error():
    with pytest.raises(KeyError, match="solver"):
        evidence.number({"result": "solver", "value": ["at", "summary", "no such key"]})


def test_plots_draw_each_bar_in_proportion():
    text = evidence.bar_plot({"one": 1.0, "two <": 2.0}, 1.0, "title")
    first, second = map(float, re.findall(r'<rect[^>]* width="([\d.]+)"', text))
    assert "two &lt;" in text
    assert second == 2 * first > 0
