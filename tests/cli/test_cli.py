"""The `jaxmem` command: what it prints, and that every wrong line is told in one message with exit
code 2.
"""

import json
import re
import subprocess
import sys
import warnings

import pytest

import jaxmem
from jaxmem._cli.doctor import combinations, kernels, release, settings
from jaxmem.cli import main

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]

STEPS = """
import jax, jax.numpy as jnp, jaxmem

def layer(x, w):
    h = jaxmem.tag(x @ w, "h", kind="linear")
    return x + jnp.sin(h) @ w.T

def build(plan):
    block = jax.checkpoint(layer, policy=jaxmem.remat_policy(plan), prevent_cse=False)
    def loss(params, x):
        return (jax.lax.scan(lambda x, w: (block(x, w), None), x, params)[0] ** 2).mean()
    def step(params, x):
        return params - jax.grad(loss)(params, x)
    return step

shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
def small(): return build, shape(4, 32, 32), shape(256, 32)
def wrong_shapes(): return build, shape(4, 32, 32), shape(256, 33)
def no_block(): return (lambda plan: lambda w, x: w - x.mean()), shape(4), shape(4)
def no_gradient(): return (lambda plan: lambda w, x: jax.checkpoint(layer, policy=jaxmem.remat_policy(plan))(x, w)), shape(32, 32), shape(8, 32)
def no_step(): return (lambda plan: 3), shape(4)
def nothing(): pass
def a_build_alone(): return build
def strings(): return "build", 3
def raises(): raise RuntimeError("no data here")
def twice():
    def two(x, w):
        return jnp.sin(jaxmem.tag(jnp.sin(jaxmem.tag(x @ w, "h")), "h"))
    def build(plan):
        block = jax.checkpoint(two, policy=jaxmem.remat_policy(plan))
        return lambda w, x: w - jax.grad(lambda w: block(x, w).sum())(w)
    return build, shape(32, 32), shape(8, 32)
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    for name in ("steps", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").write_text("not json")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"schema": 99}')
    yield tmp_path
    sys.modules.pop("steps", None)


WRONG = [
    ("", "the following arguments are required: COMMAND"),
    ("paln", "invalid choice: 'paln'.*did you mean plan"),
    ("Plan", "invalid choice"),
    ("--verbose", "required: COMMAND|unrecognized arguments"),
    ("plan", "required: MODULE:FUNCTION"),
    ("plan steps:small extra", "unrecognized arguments: extra"),
    ("plan steps:small --bugdet 3", "unrecognized arguments: --bugdet 3; did you mean --budget"),
    ("plan steps:small --budg 3", "unrecognized arguments: --budg 3; did you mean --budget"),
    ("plan steps:small --budget", "argument --budget: expected one argument"),
    ("plan steps:small --jsno", "unrecognized arguments: --jsno; did you mean --json"),
    ("plan steps", "MODULE:FUNCTION: got 'steps'; expected MODULE:FUNCTION"),
    ("plan :small", "MODULE:FUNCTION: got ':small'"),
    ("plan steps:", "MODULE:FUNCTION: got 'steps:'"),
    ("plan stpes:small", "'stpes:small': there is no such module"),
    ("plan stpes.py:small", "'stpes.py:small': importing it raised FileNotFoundError"),
    (
        "plan broken:small",
        "importing it raised ModuleNotFoundError: No module named 'nothing_of_this_name'",
    ),
    ("plan steps:smal", "'smal' is not in it; did you mean small"),
    ("plan steps:number", "'number' is no function"),
    ("plan steps:nothing", "returned NoneType; expected"),
    ("plan steps:a_build_alone", "returned function; expected"),
    ("plan steps:strings", "returned a tuple of 2; expected"),
    ("plan steps:raises", "raised RuntimeError: no data here"),
    ("plan steps:layer", "raised TypeError"),
    ("plan steps:no_step", "`build` returned int"),
    ("plan steps:no_block", "the step has no block"),
    ("plan steps:no_gradient", "no gradient is taken"),
    ("plan steps:wrong_shapes", "cannot be traced"),
    ("plan steps:twice", "tag 'h' stands twice"),
    ("plan steps:small --budget 0", "`budget` is 0; expected a positive number"),
    ("plan steps:small --budget=-5", "`budget` is '-5'; expected a positive number"),
    ("plan steps:small --budget 12GX", "`budget` is '12GX'; expected"),
    ("plan steps:small --budget nan", "`budget` is 'nan'; expected"),
    ("plan steps:small --budget 101%", "`budget` is '101%', more than all"),
    ("plan steps:small --budget ''", "`budget` is ''"),
    ("plan steps:small --host-budget lots", "`host_budget` is 'lots'"),
    ("plan steps:small --budget 1000", "the least that compiled is .* bytes"),
    ("plan steps:small --target h20", "`target` 'h20' is not known; did you mean 'h200'"),
    ("plan steps:small --target v100", "no longer knows the V100"),
    ("plan steps:small --target h200:0", "the number of devices is '0'"),
    ("plan steps:small --target h200:two", "the number of devices is 'two'"),
    ("plan steps:small --target local:2", "'local' takes no number of devices"),
    ("plan steps:small --target ''", "is not known"),
    ("plan steps:small --actions kep", "'kep' is not a valid Action; expected some of keep"),
    ("plan steps:small --actions keep,offload", "asks for offload"),
    ("plan steps:small --actions ''", "`actions`"),
    ("plan steps:small --out folder", "--out: 'folder' is a folder"),
    ("plan steps:small --out steps.py/plan.json", "--out: .* is no folder"),
    ("plan steps:small --report folder", "--report: 'folder' is a folder"),
    ("show", "required: PLAN.json"),
    ("show absent.json", "cannot read 'absent.json'"),
    ("show folder", "cannot read 'folder'"),
    ("show text.json", "cannot read 'text.json'"),
    ("show list.json", r"field `\(the whole file\)`: got 'list'"),
    ("show other.json", "field `schema`: got 99"),
    ("diff other.json", "required: B.json"),
    ("diff other.json text.json", "field `schema`"),
    ("explain steps:smal", "did you mean small"),
    ("explain steps:small --plan absent.json", "cannot read 'absent.json'"),
    ("explain steps:small --target h100", "'h100' is not known; did you mean 'h100-80gb'"),
    ("report", "required: RUN"),
    ("report absent", "absent"),
    ("report text.json", "text.json"),
    ("targets h200", "unrecognized arguments: h200"),
    ("calibrate", "required: DIR"),
    ("calibrate folder", "cannot read .*ceilings.json"),
    ("calibrate folder --out", "argument --out: expected one argument"),
    ("doctor --fix", "unrecognized arguments: --fix"),
]


def words(line: str) -> list[str]:
    return [w.replace("''", "") for w in line.split()]


def run(line: str) -> int:
    try:
        return main(words(line))
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line or "nothing" for line, _ in WRONG])
def test_wrong_lines(line, message, folder, capsys):
    before = sorted(folder.rglob("*.json"))
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert re.search(message, err), err
    assert "Traceback" not in out + err
    assert out == ""
    assert sorted(folder.rglob("*.json")) == before, "nothing half-written"


def test_enough_wrong_lines():
    assert len(WRONG) >= 60


def test_a_plan_is_made_shown_and_compared(folder, capsys):
    assert run("plan steps:small --out all.json") == 0
    assert run("plan steps:small --actions recompute --budget 400KB --json --out less.json") == 0
    out = capsys.readouterr().out
    printed = json.loads(out[out.index("{") :])
    assert printed == json.loads((folder / "less.json").read_text())
    assert run("show less.json") == 0
    assert str(jaxmem.Plan.load("less.json")) == capsys.readouterr().out.strip()
    assert run("diff all.json less.json") == 0
    text = capsys.readouterr().out
    assert "block/h: keep -> recompute" in text
    assert "budget_bytes" in text
    assert run("diff all.json all.json") == 0
    assert capsys.readouterr().out == "the plans are the same\n"


def test_progress_tells_of_compiles(folder, capsys):
    assert run("plan steps.py:small --budget 400KB") == 0
    err = capsys.readouterr().err
    assert "compile 1 of at most 6" in err
    assert "compile 2 of at most 6; least so far" in err
    assert "\r" not in err, "a pipe gets plain lines"


def test_debug_shows_the_traceback(folder):
    with pytest.raises(jaxmem.errors.BudgetError):
        run("plan steps:small --budget 0 --debug")


def test_targets_and_doctor(capsys):
    assert run("targets") == 0
    assert "h200" in capsys.readouterr().out
    assert run("targets --json") == 0
    assert {t["name"] for t in json.loads(capsys.readouterr().out)} >= {"t4", "h200", "b200"}
    assert run("doctor --json") in (0, 1)
    assert {c["level"] for c in json.loads(capsys.readouterr().out)} <= {"ok", "note", "bad"}


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, "wrong offsets"),
        ({"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.8"}, "flax 0.12.8 does not import"),
        ({"jax": "0.11.2", "jaxlib": "0.11.2", "triton": "3.9.0"}, "PTX"),
        ({"jax": "0.10.2", "jaxlib": "0.10.2", "jax-triton": "0.4.0"}, "needs jax 0.11"),
        ({"jax": "0.11.2", "jaxlib": "0.10.2"}, "with jaxlib 0.10.2"),
    ],
)
def test_the_doctor_knows_what_does_not_go_together(versions, said):
    checks = combinations(versions)
    assert any(said in c.found and c.remedy for c in checks)


def test_the_doctor_misses_kernels():
    assert kernels({"jax-triton": "0.3.1", "triton": "3.6.0"}).level == "ok"
    without = kernels({"triton": "3.6.0"})
    assert (without.level, without.remedy) == ("note", "pip install 'jaxmem[gpu]'")
    assert "without jax-triton, codecs" in without.found


def test_the_doctor_is_content_with_what_goes_together():
    assert [
        c.level for c in combinations({"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.12"})
    ] == ["ok"]
    assert [c.level for c in settings({}, gpu=False)] == ["ok"]
    assert [c.level for c in settings({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}, gpu=True)] == [
        "ok"
    ]
    assert {c.level for c in settings({}, gpu=True)} == {"note"}
    assert {c.level for c in settings({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, gpu=True)} == {
        "note"
    }
    assert release("0.11.2.dev3") == (0, 11, 2)


def test_help_imports_no_jax():
    script = (
        "import sys; from jaxmem.cli import main\ntry: main(['plan', '--help'])\nexcept SystemExit:"
        " pass\n"
    )
    script += "print(sorted({'jax', 'numpy', 'pulp'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "MODULE:FUNCTION" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
