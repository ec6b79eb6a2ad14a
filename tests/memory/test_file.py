"""An explanation's JSON: read back whole, and broken in every field."""

import copy
import json

import pytest

from jaxmem._result.memory.explanation import load
from jaxmem.errors import PlanFileError
from tests.shared.explanations import made_explanation

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
