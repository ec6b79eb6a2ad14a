"""An explanation's JSON: read back whole, and broken in every field. Live bytes as data and as a
chart.
"""

import copy
import dataclasses
import json

import pytest

from jaxmem._result.memory.explanation import load
from jaxmem._result.memory.live import phases
from jaxmem.errors import PlanFileError
from tests.shared.explanations import MIB, made_explanation, made_live

pytestmark = pytest.mark.core

DATA = json.loads(json.dumps(made_explanation(beside=True).to_json()))


def written(tmp_path, data) -> str:
    (tmp_path / "explained.json").write_text(json.dumps(data))
    return str(tmp_path / "explained.json")


def test_what_is_written_is_read(tmp_path):
    assert load(written(tmp_path, DATA)) == made_explanation(beside=True)


def test_files_of_older_and_newer_versions_are_read(tmp_path):
    older = {k: v for k, v in DATA.items() if k not in ("live", "beside", "transfers")}
    found = load(written(tmp_path, older))
    assert (found.live, found.beside, found.transfers) == (None, None, ())
    assert found.total_bytes == DATA["total_bytes"]
    assert load(written(tmp_path, DATA | {"layers": [1]})) == made_explanation(beside=True)


def places(data, at=()):
    """The path of every value in nested dicts and lists, of lists the first two."""
    yield at
    pairs = data.items() if isinstance(data, dict) else []
    pairs = enumerate(data[:2]) if isinstance(data, list) else pairs
    for key, value in pairs:
        yield from places(value, (*at, key))


NEITHER = [p for p in places(DATA) if p[-1:] not in (("live",), ("beside",))]


@pytest.mark.parametrize("value", [None, -1, "\ud800", [], {}])
def test_a_broken_field_is_named(value, tmp_path):
    for place in NEITHER:
        path, name = broken(tmp_path, place, value)
        said = rf"explained.json', field `.*({name}|\(the whole|live)"
        with pytest.raises(PlanFileError, match=said):
            load(path)


def broken(tmp_path, place, value):
    """A file with `value` in a place, and the name that the error must have."""
    data = copy.deepcopy(DATA)
    if not place:
        data = value
    else:
        *path, last = place
        holder = data
        for key in path:
            holder = holder[key]
        if isinstance(holder[last], str) and isinstance(value, str) and last != "kind":
            value = 7  # any text is one
        if last in ("host_parts", "items", "transfers") and value == []:
            value = 7
        if last == "parts" and value == [] and "live" not in place:
            value = 7
        holder[last] = value
    name = str(place[-1]) if place and isinstance(place[-1], str) else r"\S+"
    return written(tmp_path, data), name


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_no_json_is_an_error(text, tmp_path):
    (tmp_path / "explained.json").write_text(text)
    with pytest.raises(PlanFileError, match="cannot read .*explained.json"):
        load(tmp_path / "explained.json")
    with pytest.raises(PlanFileError, match="cannot read .*absent.json"):
        load(tmp_path / "absent.json")


FORWARD, BACKWARD = "jit(f)/jvp()/dot_general", "jit(f)/transpose(jvp())/dot_general"


def words(ops, loops=None) -> list[tuple[str, bool, int, int]]:
    found = phases(ops, loops or [()] * len(ops))
    return [(p.name, p.loop, p.first, p.last) for p in found]


def test_phases_are_told_by_names_and_loops():
    ops = [FORWARD] * 10 + [BACKWARD] * 20 + ["jit(f)/sub"] * 10
    loops = [()] * 5 + [("l",)] * 5 + [("m",)] * 15 + [()] * 15
    assert words(ops, loops) == [
        ("forward", False, 0, 4),
        ("forward", True, 5, 9),
        ("backward", True, 10, 24),
        ("backward", False, 25, 29),
        ("outside the gradient", False, 30, 39),
    ]


def test_what_xla_moves_away_or_does_not_name_is_of_the_phase_around_it():
    ops = [BACKWARD, "", FORWARD, *[FORWARD] * 30, BACKWARD, *[FORWARD, ""] * 10, *[BACKWARD] * 40]
    # Where most neighbours are of the backward it begins, a point before its own first name.
    assert words(ops) == [("forward", False, 0, 52), ("backward", False, 53, 93)]


@pytest.mark.parametrize("ops", [[""], ["", ""], ["jit(f)"], [FORWARD], ["jit(f)/add"] * 3])
def test_phases_are_all_points(ops):
    found = phases(ops, [()] * len(ops))
    assert [p for phase in found for p in range(phase.first, phase.last + 1)] == [*range(len(ops))]


@pytest.mark.parametrize("count", [1, 7, 39, 40, 100])
def test_fewer_points_keep_the_peak(count):
    live = made_live()
    points = live.coarser(count)
    assert len(points) == min(count, live.points)
    assert points == sorted(points)
    assert live.peak in points


def test_an_explanation_shows_both_programs_on_the_larger_scale():
    found = made_explanation(beside=True)
    text = str(found)
    assert text.index("schedule, under the plan:") < text.index("schedule, everything kept:")
    top = f"{max(found.total_bytes, found.beside.total_bytes) / MIB:.1f} MiB ┤"
    assert text.count(top) == 2
    assert f"1.0 MiB of {found.total_bytes / MIB:.1f} MiB are free even at the peak" in text
    assert text.splitlines()[-1] == found.advice
    without = dataclasses.replace(found, live=None, beside=None)
    assert "schedule" not in str(without)
