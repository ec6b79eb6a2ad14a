"""Plans' files that must be refused. Each is a valid file with one error."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from experiments import train
from jaxmem import cli
from jaxmem._core.actions import OFFLOAD
from jaxmem._model.states.places import HOST, Places
from jaxmem._result.plan.plan import Plan
from jaxmem._result.plan.rows import Bytes, Measured, WrittenStep
from jaxmem._target.compile.options import GRAPHED, HIDING, WITHOUT_COPIES
from tests.shared import plans, timelines
from tests.shared.bad import Bad, unreadable

Place = tuple[str | int, ...]  # keys and indices that lead to a value

NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**400
# Values that must be refused, by the type of the correct value.
NO_TEXT = (True, 3, 1.5, [], {}, ["local"])
NO_WHOLE = ("10", "", True, False, [], {}, [1], 1.5, -1, -(2**63), 2**63, HUGE, NAN, INFINITY)
NO_FINITE = ("0.1", "", True, False, [], {}, [0.1], -1, -1e-9, NAN, INFINITY, -INFINITY, HUGE)
NO_FLAG = (0, 1, "true", "", [], {}, 1.5)
NO_LIST = ("", "a", True, 3, 1.5, {}, {"0": 1})
NO_OBJECT = ("", "a", True, 3, 1.5, [], [1], [[]])
PASSES = (("forward",), ("backward",), ("last",))  # of a layer, whose lanes have seconds
# Fields that may be missing or null.
OPTIONAL = {
    "uncertain_seconds", "baseline_source", "places", "lanes", "microbatches", "batch", "divided",
    "compiler_options", "notes", "rows", "points", "measured", "count", "actions", "written",
}  # fmt: skip
NULLS = {
    "places", "lanes", "microbatches", "batch", "divided", "kind", "codec", "actions", "written",
}  # fmt: skip
FILE = "mine.json"
# How plans' files are read: by a program's function, and a line.
READERS: dict[str, tuple[Callable, list[str]]] = {
    "show": (cli.main, ["show", FILE]),
    "json": (cli.main, ["show", FILE, "--json"]),
    "diff": (cli.main, ["diff", "whole.json", FILE]),
    "report": (cli.main, ["report", FILE]),
    "verify": (cli.main, ["verify", FILE, "absent:step"]),
    "explain": (cli.main, ["explain", "absent:step", "--plan", FILE]),
    "train": (train.main, ["gpt_nano", f"plan.path={FILE}", "--out", "new/out"]),
}


def full() -> Plan:
    """A plan without an empty field."""
    measured = Measured("the plan", 9, 0.9, 1.0, 1.1, 5, True)
    written = WrittenStep(7, 1, 0.0135, Bytes(4, 1, 2))
    return dataclasses.replace(
        plans.plan(microbatches=4, batch=32, measured=(measured,), written=written),
        actions={"block": {"h": OFFLOAD, "up": plans.UP}},
        places=Places(12, 3, 3, 3, HOST),
        divided="moments",
        lanes=timelines.timeline(each=3),
        compiler_options={HIDING: True, GRAPHED: WITHOUT_COPIES},
    )


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yields every value in a plan's file, with its place."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, one in inner:
        yield (*place, key), one
        yield from places(one, (*place, key))


def changed(data: dict, place: Place, change) -> dict:
    """Returns a copy after `change(holder, key)` for the value at a place."""
    data = copy.deepcopy(data)
    holder: Any = data
    for key in place[:-1]:
        holder = holder[key]
    change(holder, place[-1])
    return data


def text_of(data: Any) -> bytes:
    return json.dumps(data, indent=1).encode()


def wrong(place: Place, value: Any) -> tuple[Any, ...]:
    """Returns values that are invalid at the place of `value`."""
    name = next(key for key in reversed(place) if isinstance(key, str))
    match value:
        case bool():
            found: tuple[Any, ...] = NO_FLAG
        case int() if name.endswith("seconds") or place[-2:-1] in PASSES:
            found = NO_FINITE
        case int():
            found = NO_WHOLE
        case float():
            found = NO_FINITE
        case str():
            found = NO_TEXT
            if "compiler_options" in place:
                found = tuple(one for one in found if one is not True)  # any option may be a flag
        case list():
            found = NO_LIST
        case _:
            found = NO_OBJECT
    if place[-2:] in (("parts", "working"), ("baseline_parts", "working")):
        found = tuple(one for one in found if one != -1)  # as earlier versions wrote it
    return found if name in NULLS else (None, *found)


def bad_plans(text: str) -> Iterator[Bad]:
    """Yields bad files made from `text`, the content of a plan's file."""
    data = json.loads(text)
    for place, value in places(data):
        name = str(place[0])
        for other in wrong(place, value):
            made = changed(data, place, lambda holder, key, v=other: holder.__setitem__(key, v))
            yield Bad("a value", text_of(made), name)
        if isinstance(place[-1], str):
            yield from _of_key(data, place)
    yield from _of_words(data)
    yield from _whole(data, text)
    yield from unreadable(text)
    for at in range(0, len(text) - 2, max(1, len(text) // 60)):
        yield Bad("cut off", text[:at].encode())


def _of_key(data: dict, place: Place) -> Iterator[Bad]:
    name, key = str(place[0]), str(place[-1])
    # Labels, XLA's options and lanes are optional, and labels are arbitrary.
    above = place[:-1]
    labels = "actions" in above and above.index("actions") > len(above) - 3
    lanes = place[-2:-1] in PASSES
    options = "compiler_options" in above
    if key not in OPTIONAL and not (labels or lanes or options):
        yield Bad("a missing key", text_of(changed(data, place, dict.__delitem__)), name)
    if not (labels or options):
        for other in (f"{key}s", key[:-1], key.upper()):
            named = other if not above and key != "schema" else name

            def rename(holder, key, other=other):
                holder[other] = holder.pop(key)

            yield Bad("a misspelt key", text_of(changed(data, place, rename)), named)
    mark, name = json.dumps("twice").encode(), json.dumps(key).encode()
    made = text_of(changed(data, place, lambda holder, key: holder.update({key: "twice"})))
    value = text_of(_at(data, place))
    twice = made.replace(mark, value + b", " + name + b": " + value)
    yield Bad("a key twice", twice, key)


def _at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


# Invalid words and numbers out of range, by place.
WORDS: dict[Place, tuple[Any, ...]] = {
    ("schema",): (0, 2, -1, 99, "1", 1.5),
    ("divided",): ("all", "", "Moments", "moment"),
    ("places", "outer_moments"): ("host", "", "Device"),
    ("places", "persist"): (13, 7),
    ("places", "copies"): (13, 10),
    ("places", "buffers"): (13, 7),
    ("places", "layers"): (0, 1),
    ("microbatches",): (0,),
    ("batch",): (0,),
    ("target",): ("",),
    ("fingerprint",): ("",),
    ("time_source",): ("",),
    ("baseline_source",): ("",),
    ("jax_version",): ("",),
    ("actions",): ({}, {"block": 3}, {"block": []}, {"block": {"h": 3}}, {"block": {"h": "keep"}}),
    ("actions", "block", "h", "action"): ("", "forget", "Keep", "compress", "compress_offload"),
    ("actions", "block", "up"): (
        {"action": "keep", "codec": "bit_mask()"}, {"action": "compress"}, {"codec": "bit_mask()"},
        {"action": "offload", "codec": "bit_mask()"},
    ),
    ("actions", "block", "up", "codec"): (
        "", "int4", "grouped_symmetric(group=63)", "grouped_symmetric(grup=64)", "bit_mask(1)",
        "grouped_symmetric(group=64", "naive_per_token(scale=int8)", "bit_mask()\n\0",
    ),
    ("rows", 0, "layers"): (0,),
    ("rows", 0, "shape"): ([-1], [1.5], ["4"], [True], [[4]], [None]),
    ("measured", 0, "rounds"): (0,),
    ("lanes", "microbatches"): (0,),
    ("lanes", "groups"): ([], [3], [{}]),
    ("lanes", "groups", 0, "count"): (0,),
    ("lanes", "groups", 0, "place"): ("", "nowhere", "device "),
    ("lanes", "groups", 0, "forward"): ({"nothing": 1.0}, {"compute": "1"}, {"compute": -1}),
    ("notes",): ([3], [None], [["a"]], [{}]),
    ("points",): ([3], [[]], [{}], [{"bytes": 1}], [None]),
    ("rows",): ([3], [[]], [{}], [None]),
    ("measured",): ([3], [[]], [{}], [None]),
    ("compiler_options",): ({"xla_gpu_dump": "x"}, {"a": "A,/b"}, {"a": 1}, {"a": None}, {"a": {}}),
}  # fmt: skip


def _of_words(data: dict) -> Iterator[Bad]:
    there = {place for place, _ in places(data)}
    for place, values in WORDS.items():
        for value in values if place in there else ():
            made = changed(data, place, lambda holder, key, v=value: holder.__setitem__(key, v))
            yield Bad("a word or a range", text_of(made), str(place[0]))


def _whole(data: dict, text: str) -> Iterator[Bad]:
    for whole in ([], [data], "plan", 3, None, True, {}, {"plan": data}, {"schema": 1}, 1.5):
        yield Bad("not an object", text_of(whole))
    for name in ("extra", "Schema", "step", "", "budget", "__class__"):
        yield Bad("a key more", text_of(data | {name: 1}), name)
    for depth in (900, 5000, 100_000):
        for opened, closed in (("[", "]"), ('{"a":', "}")):
            deep = opened * depth + "1" + closed * depth
            for name in ("notes", "budget_bytes", "actions", "extra"):
                rest = {key: value for key, value in data.items() if key != name}
                made = f'{{"{name}": {deep}, {json.dumps(rest)[1:]}'
                yield Bad("deep", made.encode())
    for number in ("1e400", "-1e400", "9" * 5000, "01", "+1", "1.", ".5", "0x10", "1_000", "--1"):
        for name in ("budget_bytes", "predicted_seconds"):
            rest = {key: value for key, value in data.items() if key != name}
            made = f'{{"{name}": {number}, {json.dumps(rest)[1:]}'
            yield Bad("no number", made.encode())
    for broken in (
        text + "}", text + text, text.replace(":", "="), text.replace('"', "'"), f"// a\n{text}",
        text.rstrip().removesuffix("}") + ",}", text.replace("true", "True"), f"plan = {text}",
        text.replace(",\n", "\n"), f"\ufeff{text}", f"{text}\x1a",
    ):  # fmt: skip
        if broken != text:
            yield Bad("no JSON", broken.encode())
    for place, value in places(data):
        if isinstance(value, str):
            made = changed(data, place, lambda holder, key: holder.__setitem__(key, "a\ud800"))
            yield Bad("half a character", text_of(made), str(place[0]))
    yield Bad("half a character", text_of(data | {"notes": ["\udfff"]}), "notes")
    yield Bad("half a character", text_of(data | {"actions": {"\ud800": {}}}), "actions")
