"""What the commands print, write and return: a table that fits the terminal, and files that are
written after it.
"""

import errno
import io
import json
import os
import re
import sys
from importlib import metadata

import pytest

import jaxmem
from jaxmem._core.database import TABLES, Database, Timing, default_path
from jaxmem._result.memory.explanation import load
from jaxmem._target.devices.chips import TPUS
from tests.shared import children
from tests.shared.command import Terminal, listing, run
from tests.shared.plans import WHY, plan

pytestmark = pytest.mark.jax_defaults


@pytest.fixture
def shown(capsys):
    """What a line prints that is in order."""

    def of(line: str) -> str:
        capsys.readouterr()
        assert run(line) == 0
        return capsys.readouterr().out

    return of


@pytest.fixture
def told(shown):
    """What a line prints as JSON."""
    return lambda line: json.loads(shown(f"{line} --json"))


def test_a_plan_is_made_shown_compared_and_verified(folder, capsys, shown, told):
    assert run("plan steps:small --out all.json --report all.html") == 0
    assert "Memory over the step" in (folder / "all.html").read_text()
    capsys.readouterr()
    assert (
        run("plan steps:small --actions 'Keep, RECOMPUTE' --budget 400KB --json --out less.json")
        == 0
    )
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "less.json").read_text())
    assert run("show less.json") == 0
    assert str(jaxmem.Plan.load("less.json")) == capsys.readouterr().out.strip()
    text = shown("diff all.json less.json")
    assert "block/h: keep -> recompute" in text
    assert "budget_bytes" in text
    assert shown("diff all.json all.json") == "the plans are the same\n"
    less = jaxmem.Plan.load("less.json")
    said = shown("verify less.json steps:small")
    assert "the plan is this step's, and fits: it compiles to" in said
    figures = told("verify less.json steps:small")
    assert figures["compiled_bytes"] == figures["planned_bytes"] == less.compiled_bytes
    assert run("verify less.json steps:tiny") == 2
    assert "the plan is for another model" in capsys.readouterr().err
    data = json.loads((folder / "less.json").read_text()) | {"budget_bytes": 1000}
    (folder / "less.json").write_text(json.dumps(data))
    assert run("verify less.json steps:small") == 2
    assert "over its budget of 1000 B" in capsys.readouterr().err


def test_a_step_is_explained(folder, capsys, shown, told):
    assert run("explain steps:tiny") == 0
    out, err = capsys.readouterr()
    assert "on local, everything kept" in out
    assert "compiling the step" in err
    explained = told("explain steps:tiny")
    assert sum(part["bytes"] for part in explained["parts"]) == explained["total_bytes"]
    (folder / "nothing.json").write_text('{"block": {"h": "recompute"}}')
    assert run("plan steps:tiny --policy nothing.json --out plan.json") == 0
    capsys.readouterr()
    out = shown("explain steps:tiny --plan plan.json --beside --out explained.json")
    assert str(load(folder / "explained.json")) == out.strip()
    assert run("report .") == 0
    assert "Memory over the step" in (folder / "report.html").read_text()
    assert out.count("▼") == 2
    assert out.index("under the plan:") < out.index("everything kept:")


def test_actions_written_by_hand_are_estimated_without_a_compile(folder, capsys, shown):
    (folder / "some.json").write_text('{"block": {"h": "keep"}}')
    (folder / "none.json").write_text('{"block": {"h": "recompute"}}')
    told = {}
    for name in ("some", "none"):
        assert run(f"estimate {name}.json steps:tiny --json") == 0
        out, err = capsys.readouterr()
        assert "compile" not in err
        told[name] = json.loads(out)
    assert told["some"]["saved_bytes"] > told["none"]["saved_bytes"]
    assert told["some"]["bytes"] > told["none"]["bytes"] > told["none"]["arguments_bytes"]
    out = shown("estimate some.json steps:tiny")
    assert "not compiled" in out
    assert "with everything kept" in out


def test_a_step_as_it_is_is_planned_verified_and_explained(folder, capsys, shown):
    assert run("plan steps:a_step --auto --budget 400KB --out auto.json") == 0
    blocks = {label.partition("[")[0] for label in jaxmem.Plan.load("auto.json").actions}
    assert blocks == {"auto"}
    assert run("verify auto.json steps:a_step --auto") == 0
    capsys.readouterr()
    out = shown("explain steps:a_step --auto --plan auto.json")
    assert "auto: 4 layers, steps.py:" in out
    assert "the layer's input" in out
    assert "under the plan" in out
    assert run("explain steps:a_step --auto --json") == 0
    (layers,) = json.loads(capsys.readouterr().out)["layers"]
    assert layers["count"] == 4
    assert {"in", "linear"} <= {tag["name"] for tag in layers["tags"]}
    assert all("steps.py:" in tag["place"] for tag in layers["tags"] if tag["name"] != "in")


def test_options_are_the_planners(folder, monkeypatch):
    given = {}
    monkeypatch.setattr(
        "jaxmem._cli.steps.make_plan", lambda *_, **named: given.update(named) or plan()
    )
    line = "plan steps:tiny --microbatches '1, 2,4' --actions Lossless --target h200:8"
    line += " --codecs 'bit_mask; naive_per_token(scale=float32)' --codecs grouped_symmetric"
    line += " --batch fastest --sizes '8, 16' --decide actions,states,sharding"
    assert run(line) == 0
    assert given["fresh"] is False
    assert given["microbatches"] == [1, 2, 4]
    assert given["codecs"] == [
        "bit_mask()",
        "naive_per_token(scale=float32)",
        "grouped_symmetric(group=64,scale=bfloat16)",
    ]
    assert given["actions"] == "Lossless"
    assert given["target"] == "h200:8"
    assert (given["batch"], given["sizes"]) == ("fastest", [8, 16])
    assert given["decide"] == ["actions", "states", "sharding"]
    assert run("plan steps:tiny --fresh --batch max --sizes 8:4097:8") == 0
    assert given["fresh"] is True
    assert given["sizes"] == range(8, 4097, 8)
    assert tuple(given["decide"]) == ("actions",)


def test_a_size_is_chosen_and_its_plan_verified_and_explained(folder, capsys, told):
    line = "plan steps:rows --budget 300KB --batch max --sizes 64:513:64 --actions lossless"
    assert run(f"{line} --out sized.json --report sized.html") == 0
    made = jaxmem.Plan.load("sized.json")
    assert made.batch in range(64, 513, 64)
    assert f"batch: {made.batch}" in capsys.readouterr().out
    assert "Memory over the step" in (folder / "sized.html").read_text()
    assert told("verify sized.json steps:rows")["compiled_bytes"] == made.compiled_bytes
    assert told("explain steps:rows --plan sized.json")["total_bytes"] == made.compiled_bytes


def test_a_frontier_is_printed_and_written(folder, capsys, shown, told):
    line = "plan steps:rows --frontier --batches 64,256 --budgets 300KB,1MB --actions lossless"
    out = shown(f"{line} --tokens 3 --out frontier.json --report frontier.html")
    found = jaxmem.plans.Frontier.load("frontier.json")
    assert str(found) == out.strip()
    assert (found.batches, found.budgets) == ((64, 256), (300_000, 1_000_000))
    assert found.tokens == 3
    assert found.best("1MB").compiled_bytes <= 1_000_000
    page = (folder / "frontier.html").read_text()
    assert f"batch {found.best('1MB').batch}" in page
    data = told(line)
    assert [cell["batch"] for cell in data["cells"]] == [64, 64, 256, 256]
    assert shown("show frontier.json").strip() == str(found)
    assert told("show frontier.json") == found.to_json()
    assert shown("report frontier.json --out again.html").strip() == "again.html"
    figures = lambda name: (folder / name).read_text().replace(name, "")
    assert figures("again.html") == figures("frontier.html")
    assert run("report frontier.json frontier.json") == 2
    assert "expected a frontier alone" in capsys.readouterr().err


def test_what_the_users_code_prints_is_not_among_the_json(folder, capsys):
    assert run("plan steps:talks --json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["target"] == "local"
    assert "reading data" in err


def test_targets(capsys, shown):
    out = shown("targets")
    sources = dict(re.findall(r"^(\S+) .*  (\S.*)$", out, re.M))
    assert (sources["a10g"], sources["h200"]) == ("a roofline", "XLA's estimates")
    assert {sources[name] for name in TPUS} == {"a roofline of XLA's fusions"}
    assert "a slice of N chips" in " ".join(out.split())
    assert run("targets --json") == 0
    names = {t["name"] for t in json.loads(capsys.readouterr().out)}
    assert names >= {"t4", "h200", "b200", "v5e", "tpu7x"}


def test_the_cache_is_shown_and_cleared(folder, capsys, monkeypatch, shown, told):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    path = default_path()
    assert run("cache --json") == 0
    empty = {"path": str(path), "bytes": 0, "rows": dict.fromkeys(TABLES, 0), "fault": None}
    assert json.loads(capsys.readouterr().out) == empty
    Database().write_times("cpu", "measured", {"a": Timing(1.0), "b": Timing(2.0)})
    held = told("cache")
    assert held["rows"]["times"] == 2
    assert held["bytes"] == sum(file.stat().st_size for file in path.parent.iterdir())
    out = shown("cache")
    assert out.startswith(f"{path}: ")
    assert "2 times" in out
    assert told("cache --clear") == {"path": str(path), "freed_bytes": held["bytes"]}
    assert list(path.parent.iterdir()) == []
    path.write_bytes(b"no database at all" * 100)
    assert run("cache") == 0
    assert "database" in capsys.readouterr().out.removeprefix(f"{path}")
    assert shown("cache --clear") == f"{path}: 1.8 KiB freed\n"


def test_the_version_is_the_packages(shown):
    version = metadata.version("jaxmem")
    assert shown("--version").startswith(f"jaxmem {version} (jax {metadata.version('jax')}, ")
    assert jaxmem.__version__ == version
    assert "__version__" in dir(jaxmem)


WITHOUT_JAX = """
import sys
import jaxmem
from jaxmem.cli import main

lines = "--version|--help|plan --help|targets|cache|show plan.json|show plan.json --json"
lines += "|diff plan.json second.json|report plan.json second.json --out page.html"
lines += "|plan|show broken.json|calibrate folder"
codes = []
for line in lines.split("|"):
    try:
        codes.append(main(line.split()))
    except SystemExit as stop:
        codes.append(stop.code)
print(jaxmem.__version__)
print(codes, sorted({"jax", "numpy", "pulp"} & set(sys.modules)))
"""


def test_what_needs_no_jax_imports_none(folder):
    text = (folder / "plan.json").read_text().replace("grouped_symmetric", "groped_symmetric")
    (folder / "broken.json").write_text(text)
    done = children.python("-c", WITHOUT_JAX)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2] []"
    assert "no codec 'groped_symmetric'; expected one of" in done.stderr


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"1 ? 2"), ("latin-1", b"1 \xb1 2")])
def test_characters_that_the_output_cannot_encode_are_replaced(
    folder, monkeypatch, encoding, shown
):
    plan(notes=("1 ± 2",)).save("plan.json")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out := io.BytesIO(), encoding))
    assert run("show plan.json") == 0
    assert shown in out.getvalue()


@pytest.mark.parametrize("line", [["show", "plan.json"], ["show", "missing.json"]])
def test_closed_streams_receive_nothing(folder, line):
    closed = "import sys; sys.stdout = sys.stderr = None; from jaxmem.cli import main"
    done = children.python("-c", f"{closed}; sys.exit(main({line}))", check=False)
    assert (done.returncode, done.stdout + done.stderr) == (2 * (line[1] != "plan.json"), "")


class Gone(io.StringIO):
    """A pipe that nobody reads."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


class Full(io.StringIO):
    """A file on a disk without room."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def planned(folder, monkeypatch):
    """`jaxmem plan` without the planning."""
    monkeypatch.setattr("jaxmem._cli.steps.make_plan", lambda *_, **__: plan())
    return folder


def on_a_terminal(line: str, columns: int, monkeypatch) -> str:
    """What a line shows on a terminal, without colours."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert run(line) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("line", ["show plan.json", "plan steps:tiny"])
def test_the_table_fits_the_terminal(line, columns, planned, monkeypatch):
    shown = on_a_terminal(line, columns, monkeypatch)
    assert max(map(len, shown.splitlines())) <= columns
    assert "grouped_symmetric" in shown
    assert "compiled 9.0 MiB of a budget of 10.0 MiB (90.0 %) on" in re.sub(r"\s+", " ", shown)
    why = [line[shown.splitlines()[0].index("why") :] for line in shown.splitlines()]
    assert re.sub(r"\s+", " ", " ".join(why[1:])).strip().startswith(f"{WHY} {WHY}")


def test_without_rich_and_in_a_pipe_the_table_is_plain(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert run("show plan.json") == 0
    assert capsys.readouterr().out == f"{plan()}\n"
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert on_a_terminal("show plan.json", 60, monkeypatch) == f"{plan()}\n"


def test_names_are_shown_as_they_are(folder, monkeypatch):
    plan(notes=("of block[0:6], [red] and :smile:",)).save("markup.json")
    shown = on_a_terminal("show markup.json", 120, monkeypatch)
    assert "note: of block[0:6], [red] and :smile:" in shown


def test_a_plan_is_written_after_it_was_shown(planned, capsys):
    assert run("plan steps:tiny --out new/plan.json --report new/plan.html") == 0
    assert capsys.readouterr().out == f"{plan()}\n"
    assert jaxmem.Plan.load("new/plan.json") == plan()
    assert (planned / "new" / "plan.html").read_text().startswith("<!DOCTYPE html>")


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_plan_that_cannot_be_written_after_all_was_shown(planned, capsys, monkeypatch):
    monkeypatch.setattr("os.fsync", full)
    before = listing(planned)
    assert run("plan steps:tiny --out a.json --report a.html") == 2
    out, err = capsys.readouterr()
    assert out == f"{plan()}\n"
    assert "--out: 'a.json' could not be written: No space left on device" in err
    assert "--report: 'a.html' could not be written" in err
    assert "the result is printed above" in err
    assert listing(planned) == before


def test_a_report_that_cannot_be_written_takes_no_plan_with_it(planned, capsys, monkeypatch):
    monkeypatch.setattr("jaxmem._train.report.report.write_whole", full)
    assert run("plan steps:tiny --report a.html --out a.json") == 2
    assert "--report: 'a.html' could not be written" in capsys.readouterr().err
    assert jaxmem.Plan.load("a.json") == plan()


@pytest.mark.parametrize("stream", [Gone, Full])
def test_a_plan_is_written_even_if_nobody_can_read_it(stream, planned, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream())
    assert run("plan steps:tiny --out a.json") == (0 if stream is Gone else 2)
    assert ("No space left" in capsys.readouterr().err) == (stream is Full)
    assert jaxmem.Plan.load("a.json") == plan()
