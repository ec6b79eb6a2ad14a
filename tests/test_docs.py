"""docs/: each model runs before and after its five changed lines, to the same loss; the examples of
the other pages run as they stand.
"""

import argparse
import ast
import pathlib
import re
import shlex
import sys

import jax
import numpy as np
import pytest

import jaxmem
from jaxmem.cli import main, parser
from tests.shared.marks import slow

pytestmark = pytest.mark.jax_defaults
DOCS = pathlib.Path(__file__).parent.parent / "docs"
DIFFS = re.findall(r"## (\w+)[^\n]*\n\n```diff\n(.*?)```", (DOCS / "adopting.md").read_text(), re.S)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, tmp_path_factory, monkeypatch):
    """Programs run in a folder of their own, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)


def side(diff: str, gone: str) -> str:
    """The program on one side of a diff: without the lines marked `gone`."""
    lines = [line for line in diff.splitlines() if not line.startswith(gone)]
    return "\n".join(line[1:] for line in lines)


def run(name: str) -> dict:
    """What a page's Python blocks define, run one after the other."""
    found: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.S):
        exec(compile(block, name, "exec"), found)
    return found


@pytest.mark.slow
def test_a_policy_of_ones_own_is_priced(capsys):
    """The example of plans.md, with the model of the README that has tags, for this machine."""
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", readme, re.S)
    (tagged,) = (block for block in others if "def build(plan)" in block)
    model = "".join(block.partition("plan = ")[0] for block in (first, tagged))
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "plans.md").read_text("utf-8"), re.S)
    found: dict = {}
    exec(compile(model, "README.md", "exec"), found)
    for example in examples:
        exec(compile(example.replace('target="h200"', 'target="local"'), "plans.md", "exec"), found)
    out = capsys.readouterr().out
    assert re.search(r"^up +linear +keep .*\ngelu +gelu +recompute ", out, re.M)
    assert re.search(r"^\d+ \d+ -?[\d.e-]+$", out, re.M)  # the estimate's line


def test_every_way_is_shown():
    assert [name for name, _ in DIFFS] == ["Linen", "NNX", "Plain"]


@pytest.mark.core
@pytest.mark.parametrize(("name", "diff"), [DIFFS[0], *(slow(*d) for d in DIFFS[1:])])
def test_five_changed_lines_plan_a_model(name, diff):
    assert all(line[:1] in " +-" for line in diff.splitlines())
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 5
    before, after = {}, {}
    exec(compile(side(diff, "+"), f"{name}, before", "exec"), before)
    exec(compile(side(diff, "-"), f"{name}, after", "exec"), after)
    assert np.isfinite(before["value"])
    np.testing.assert_allclose(after["value"], before["value"], rtol=1e-5)


@pytest.mark.slow
def test_the_tutorial_is_shown_as_it_runs(capsys):
    found = run("tutorial.md")
    assert found["plan"].compiled_bytes <= 16 * 2**20 < found["plan"].baseline_bytes / 2
    assert found["losses"][-1] < found["losses"][0] - 2, "it learns"
    assert int(found["restored"].step) == 41
    assert float(found["value"]) < found["losses"][0] - 2, "the restored state goes on"
    assert "evaluation takes" in capsys.readouterr().out


@pytest.mark.slow
def test_the_stack_is_shown_as_it_runs():
    found = run("stack.md")
    assert found["plan"].compiled_bytes <= 80e6
    (m, v) = found["moments"]["w"]
    assert m.shape == v.shape == (3, 16, 16)
    assert float(abs(m).max()) > 0
    assert float(v.min()) >= 0


@pytest.mark.slow
def test_auto_is_shown_as_it_runs():
    found = run("auto.md")
    assert found["plan"].compiled_bytes <= found["plan"].budget_bytes < found["plan"].baseline_bytes
    _, value = found["plan"].step(found["state"], found["tokens"])
    assert np.isfinite(value)
    states = found["conductivity"].nbytes * 256
    assert found["fit"].plan.compiled_bytes <= found["fit"].plan.budget_bytes < states
    assert float(abs(found["conductivity"]).max()) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Transformers says that its Flax models are deprecated
def test_models_of_libraries_are_shown_as_they_run():
    found = run("libraries.md")
    loaded = jaxmem.Plan.load("gpt2.json")
    assert loaded.compiled_bytes <= 400 * 2**20 < loaded.baseline_bytes / 2
    assert found["plan"].compiled_bytes <= 60 * 2**20 < found["plan"].baseline_bytes / 2
    assert np.isfinite(found["value"])


@pytest.mark.slow
def test_a_decoder_is_planned_for_a_slice_of_tpus_as_shown(tmp_path, monkeypatch):
    """Then the plan's step runs on this CPU, with the same tags on less of everything."""
    monkeypatch.syspath_prepend(str(tmp_path))
    page = (DOCS / "tpu.md").read_text("utf-8")
    program, laptop, device = re.findall(r"```python\n(.*?)```", page, re.S)
    # A module of its own for each, since JAX remembers the shapes that a function returned.
    less = {"WIDTH": 64, "HIDDEN": 128, "HEADS": 2, "VOCABULARY": 256, "CONTEXT": 128}
    small = program + "".join(f"{name} = {size}\n" for name, size in less.items())
    device = device.replace("from decoder", "from smaller")
    for name, text in (("decoder", program), ("smaller", small)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    found: dict = {}
    try:
        exec(compile(laptop, "tpu.md", "exec"), found)
        plan = found["plan"]
        assert (plan.target, found["devices"]) == ("v5e:16x16", 256)
        assert plan.compiled_bytes <= plan.budget_bytes < plan.baseline_bytes
        exec(compile(device, "tpu.md", "exec"), found)
        state, batch = found["first"](jax.random.key(0)), found["batch"]
        _, unplanned = jax.jit(found["build"](None))(state, batch)
        np.testing.assert_allclose(found["loss"], unplanned, rtol=1e-2)  # bfloat16
    finally:
        for name in ("decoder", "smaller"):
            sys.modules.pop(name, None)


@pytest.mark.slow
def test_adama_is_shown_as_it_runs():
    found = run("adama.md")
    assert found["plan"].microbatches == 1, "everything fits"
    # One state goes through all of them: plain, planned, split twice, and over devices.
    assert int(found["state"][1].count) == 5
    assert np.isfinite(found["metrics"]["loss"])


@pytest.mark.slow
def test_the_rectifier_is_shown_as_it_runs():
    found = run("rectifier.md")
    assert found["rectifier"].counts["block"].keys() == {"hidden"}
    read = jaxmem.runs.read("runs/revised")
    assert [one.step for one in read.outliers] == [1, 2, 4, 8, 16]
    assert read.decisions
    assert read.plan.actions == found["rectifier"].plan.actions


def test_what_the_docs_point_to_is_there():
    for text in (p.read_text() for p in DOCS.glob("*.md")):
        for path in re.findall(r"`((?:benchmarks|configs|experiments)/[\w/.]+)`", text):
            assert (DOCS.parent / path).exists(), path


@pytest.mark.core
def test_the_index_of_the_folder_has_the_pages_of_the_site_in_their_order():
    site = re.findall(r": (\w+\.md)$", (DOCS.parent / "mkdocs.yml").read_text("utf-8"), re.M)
    listed = re.findall(r"^\| \[.*?\]\((\w+\.md)\)", (DOCS / "README.md").read_text("utf-8"), re.M)
    made_elsewhere = {"index.md", "contributing.md", "changelog.md"}
    assert listed == [page for page in site if page not in made_elsewhere]
    assert {*listed} == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def public_names() -> set[str]:
    """jaxmem's public names, with those of its public modules, from the sources."""
    sources = pathlib.Path(jaxmem.__file__).parent
    names = {f"jaxmem.{name}" for name in named(sources / "_public.py")}
    for module in sorted(n for n in names if (sources / f"{n.split('.')[1]}.py").exists()):
        names.remove(module)
        names |= {f"{module}.{name}" for name in named(sources / f"{module.split('.')[1]}.py")}
    return names


def named(source: pathlib.Path) -> set[str]:
    """What a file defines, or hands on as `X as X`."""
    found: set[str] = set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.name == alias.asname}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.core
def test_every_public_name_has_an_entry_in_the_api_reference():
    pages = sorted((DOCS / "api").glob("*.md"))
    entries = [e for p in pages for e in re.findall(r"^::: (\S+)$", p.read_text("utf-8"), re.M)]
    assert {"jaxmem.plan", "jaxmem.Plan", "jaxmem.codecs.parse"} <= public_names()
    assert sorted(entries) == sorted(public_names()), "one entry each, and none of another name"
    index = (DOCS / "api" / "index.md").read_text("utf-8")
    assert [name for name in entries if f".md#{name})" not in index] == []


@pytest.mark.core
def test_every_subcommand_and_option_is_explained():
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    page = (DOCS / "command.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert commands.choices.keys() <= sections.keys()
    for name, command in commands.choices.items():
        options = {o for a in command._actions for o in a.option_strings if o.startswith("--")}
        told = set(re.findall(r"^\| `(--[\w-]+)", sections[name], re.M))
        assert told == options - {"--help", "--debug"}, name


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The program of the command's page as the module `train` of the current folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    page = (DOCS / "command.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n# train.py\n(.*?)```", page, re.S)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    yield page
    sys.modules.pop("train", None)


@pytest.mark.slow
def test_the_commands_are_shown_as_they_run(train, tmp_path, capsys):
    blocks = re.findall(r"```\n(jaxmem.*?)```", train, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 10
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr().err)
    written = {path.name for path in tmp_path.iterdir()}
    assert {"plan.json", "plan.html", "h200.json", "compared.html"} <= written
    assert jaxmem.Plan.load("h200.json").target == "h200"
    assert "microbatches: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_of_the_laptop_runs_elsewhere_as_shown(train, tmp_path):
    """Elsewhere is this CPU, on which the step must fit as it does on the GPU."""
    found = run("troubleshooting.md")
    assert found["plan"].target == "h200"
    assert 0 < found["found"] <= found["plan"].budget_bytes < found["plan"].baseline_bytes / 2
    assert np.isfinite(found["w"]["up"]).all()
    with pytest.raises(jaxmem.errors.StepError, match="this plan holds no executable"):
        found["plan"].step  # noqa: B018
