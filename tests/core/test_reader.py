"""The reader of JSON: what it reads it writes, and an error names the field, what was got and what
was expected.
"""

import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import pytest

from jaxmem._core.reader import Broken, Count, Name, Reader, Valid, named, one_of
from jaxmem.errors import PlanFileError


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    y: float = 0.0


@dataclasses.dataclass(frozen=True)
class Lanes:
    seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Thing:
    name: Name
    size: int
    count: Count
    where: Annotated[str, one_of(("here", "there"))]
    flag: bool
    points: tuple[Point, ...]
    pair: tuple[int, str]
    lanes: Lanes
    colour: Colour
    kind: str | None
    anything: Any = None
    even: Annotated[int, Valid("an even number", lambda n: n % 2 == 0)] = 2
    signed: Annotated[int, Valid("a number", lambda n: isinstance(n, int), instead=True)] = 0
    inner: "Thing | None" = None
    _hidden: Any = None


STRICT = Reader(strict=True, bare=(Lanes,))
LENIENT = Reader(bare=(Lanes,))
POINTS = (Point(1.0), Point(2.0, 3.0))
THING = Thing("a", 3, 1, "here", True, POINTS, (1, "b"), Lanes({"up": 0.5}), Colour.RED, None)
PLAIN = {
    "name": "a", "size": 3, "count": 1, "where": "here", "flag": True,
    "points": [{"x": 1.0}, {"x": 2.0, "y": 3.0}], "pair": [1, "b"], "lanes": {"up": 0.5},
    "colour": "red", "kind": None,
}  # fmt: skip


@pytest.mark.parametrize("reader", [STRICT, LENIENT])
def test_what_is_written_is_read(reader):
    assert reader.plain(THING) == PLAIN
    assert reader.read(Thing, json.loads(json.dumps(PLAIN))) == THING
    nested = dataclasses.replace(THING, inner=THING, even=4, signed=-3)
    assert reader.read(Thing, json.loads(json.dumps(reader.plain(nested)))) == nested


def test_whole_types_are_written_and_read_with_all_fields():
    whole = Reader(whole=(Point,))
    assert whole.plain(Point(1.0)) == {"x": 1.0, "y": 0.0}
    with pytest.raises(Broken, match="field `y`: got None, expected a finite number"):
        whole.read(Point, {"x": 1.0})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": ""}, "field `name`: got '', expected a text that is not empty"),
        ({"name": 3}, "field `name`: got 3, expected a text that is not empty"),
        ({"size": True}, "field `size`: got True, expected a whole number of at least 0"),
        ({"size": 1.0}, "field `size`: got 1.0, expected a whole number of at least 0"),
        ({"size": 2**63}, "field `size`: got"),
        ({"count": 0}, "field `count`: got 0, expected a whole number of at least 1"),
        ({"where": "no"}, "field `where`: got 'no', expected one of here, there"),
        ({"where": []}, "field `where`: got [], expected one of here, there"),
        ({"flag": 1}, "field `flag`: got 1, expected true or false"),
        ({"points": {}}, "field `points`: got {}, expected a list"),
        ({"points": [3]}, "field `points[0]`: got 3, expected an object with x, y"),
        ({"points": [{"x": -1}]}, "field `points[0].x`: got -1, expected a finite number"),
        ({"points": [{}]}, "field `points[0].x`: got None, expected a finite number"),
        ({"pair": [1]}, "field `pair`: got [1], expected a list of 2 values"),
        ({"pair": [1, 2]}, "field `pair[1]`: got 2, expected a text"),
        ({"lanes": {"up": "x"}}, "field `lanes.up`: got 'x', expected a finite number"),
        ({"lanes": []}, "field `lanes`: got [], expected an object"),
        ({"lanes": {"\ud800": 1}}, "field `lanes`: got {'\\ud800': 1}, expected an object"),
        ({"colour": "blue"}, "field `colour`: got 'blue', expected one of red"),
        ({"kind": 3}, "field `kind`: got 3, expected a text or null"),
        ({"even": 3}, "field `even`: got 3, expected an even number"),
        ({"even": -2}, "field `even`: got -2, expected an even number"),
        ({"signed": None}, "field `signed`: got None, expected a number"),
        ({"inner": {"name": "a"}}, "field `inner.size`: got None, expected a whole number"),
        ({"_hidden": 1}, "field `_hidden`: got 1, expected no such field"),
        ({"sizes": 1}, "field `sizes`: got 1, expected no such field; the nearest is size"),
        ({"name": "\ud800"}, "field `name`: got '\\ud800', expected a text"),
    ],
)
def test_a_broken_field_is_named(change, error):
    with pytest.raises(Broken, match=re.escape(error)):
        STRICT.read(Thing, PLAIN | change)


@pytest.mark.parametrize("name", PLAIN)
def test_a_missing_field_is_named_and_null_does_not_stand_for_it(name):
    rest = {key: value for key, value in PLAIN.items() if key != name}
    with pytest.raises(Broken, match=f"field `{name}`: got None"):
        LENIENT.read(Thing, rest)


def test_a_lenient_reader_ignores_unknown_fields_and_takes_any_text():
    assert LENIENT.read(Thing, PLAIN | {"sizes": 1, "name": "\ud800"}).name == "\ud800"


def _fail(error: Exception, line: int | None = None) -> None:
    with named("report:", "a.json", "a file", "mend it", line):
        raise error


def test_errors_name_the_file():
    whole = "'a.json', field `(the whole file)`: got 'list', expected"
    for error, line, said in (
        (Broken([1], "an object"), None, whole),
        (Broken([1], "an object"), 3, "report: 'a.json', line 3: got [1], expected an object;"),
        (Broken(1, "a text", "b[0].c"), 3, "'a.json', line 3, field `b[0].c`: got 1, expected"),
        (ValueError("odd"), 3, "report: cannot read 'a.json', line 3: odd; expected a file"),
        (OSError("full"), None, "report: cannot read 'a.json': full; expected a file"),
    ):
        with pytest.raises(PlanFileError, match=re.escape(said)):
            _fail(error, line)


def test_a_type_is_read_specially():
    def doubled(value: Any, read) -> Point:
        found = read(value)
        if found.x == 0:
            raise Broken(found.x, "a number above 0", "x")
        return dataclasses.replace(found, x=2 * found.x)

    reader = Reader(special={Point: doubled})
    assert reader.read(tuple[Point, ...], [{"x": 1}]) == (Point(2.0),)
    with pytest.raises(Broken, match=r"field `\[0\]\.x`: got 0.0, expected a number above 0"):
        reader.read(tuple[Point, ...], [{"x": 0}])
