"""An error of the user's own code is told with the line of theirs that raised it."""

import pathlib
import re
import warnings

import pytest

from jaxmem._cli.errors import message
from jaxmem.errors import StepError
from tests.shared import children
from tests.shared.command import run
from tests.shared.marks import slow

pytestmark = pytest.mark.jax_defaults


def marked(file, mark: str) -> int:
    """The number of the line that a comment marks."""
    lines = file.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def told(line: str, capsys) -> str:
    """What a line says in place of a result."""
    assert run(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(
    ("name", "said", "function"),
    [
        ("raises", "'steps:raises' raised RuntimeError: no data here", "raises"),
        ("opens", "'steps:opens' raised FileNotFoundError: .*absent.bin'", "opens"),
        ("chained", "'steps:chained' raised ValueError: from below", "chained"),
        ("exits", r"called sys.exit\(0\); expected that it returns.*", "exits"),
        ("exits_with_a_text", r"called sys.exit\('no flags'\);.*", "exits_with_a_text"),
        ("build_raises", "`build` raised KeyError: 'missing'", "<lambda>"),
        ("build_type_error", "`build` raised TypeError: object of type 'int'.*", "<lambda>"),
        ("build_exits", r"called sys.exit\(\);.*", "<lambda>"),
        ("step_raises", "cannot be traced .*: ValueError: bad step", "step"),
        ("step_branches", r"cannot be traced .*: TracerBoolConversionError: .*\n(.*\n)+.*", "step"),
        ("step_exits", r"called sys.exit\(7\);.*", "<lambda>"),
        ("misnamed_tag", "tag: `name` is 3; expected a non-empty string.*", "<lambda>"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_an_error_of_the_function_the_build_or_the_step(
    command, name, said, function, folder, capsys
):
    err = told(f"{command} steps:{name}", capsys)
    line = marked(folder / "steps.py", name)
    where = rf"\(steps.py:{line}, in {function}; --debug shows the traceback\)"
    assert re.search(rf"jaxmem {command}: error: .*{said}\s{where}\n$", err), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "said", "file", "line"),
    [
        ("broken", "importing it raised ModuleNotFoundError: .*nothing_of_this_name", "broken", 2),
        ("broken.py", "importing it raised ModuleNotFoundError: .*nothing_of", "broken", 2),
        ("syntax", "importing it raised SyntaxError: invalid syntax", "syntax", 2),
        ("uses_syntax", "importing it raised SyntaxError: invalid syntax", "syntax", 2),
        (
            "ends",
            r"called sys.exit\(3\); .*belongs under `if __name__ == \"__main__\":`",
            "ends",
            3,
        ),
        ("raising", "importing it raised KeyError: 'gone'", "raising", 2),
    ],
)
def test_an_error_while_the_module_is_imported(name, said, file, line, folder, capsys):
    err = told(f"plan {name}:planned", capsys)
    assert re.search(rf"{said}.* \({file}.py:{line}[^0-9].*--debug shows the traceback\)\n$", err)
    assert "Traceback" not in err


@pytest.mark.parametrize("line", ["plan steps:raises --debug", "--debug plan steps:raises"])
def test_debug_shows_the_traceback_too(line, folder, capsys):
    err = told(line, capsys)
    assert err.startswith("Traceback")
    number = marked(folder / "steps.py", "raises")
    assert f'steps.py", line {number}, in raises' in err
    assert err.splitlines()[-1].startswith("jaxmem plan: error: MODULE:FUNCTION: 'steps:raises'")


def test_debug_shows_the_traceback_of_jaxmems_own_errors(folder, capsys):
    err = told("plan steps:tiny --budget 0 --debug", capsys)
    assert "Traceback" in err
    assert "jaxmem.errors.BudgetError" in err


def test_an_interrupt_is_none_of_these(folder, capsys):
    assert run("plan steps:interrupts") == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_what_nobody_foresaw_keeps_its_traceback(folder, capsys, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("in jaxmem")

    monkeypatch.setattr("jaxmem._cli.plans.show_plan", fails)
    with pytest.raises(ZeroDivisionError, match="in jaxmem"):
        run("show plan.json")
    assert "please report it" in capsys.readouterr().err


def test_warnings_go_to_standard_error_while_a_command_runs(folder, capsys, monkeypatch):
    before = warnings.showwarning
    monkeypatch.setattr(
        "jaxmem._cli.plans.show_plan", lambda *_: warnings.warn("of a tag", stacklevel=1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run("show plan.json") == 0
    assert capsys.readouterr().err == "warning: of a tag\n"
    assert warnings.showwarning is before


def test_a_file_outside_of_the_folder_is_named_whole(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder / "folder")
    err = told("plan ../steps.py:raises", capsys)
    assert f"({folder / 'steps.py'}:{marked(folder / 'steps.py', 'raises')}, in raises;" in err


def test_frames_of_python_and_of_installed_packages_are_not_the_users():
    with pytest.raises(re.error, match="missing") as caught:
        re.compile("(")  # here
    with pytest.raises(StepError, match="outer") as outer:
        raise StepError("outer") from caught.value
    here = marked(pathlib.Path(__file__), "here")
    where = rf"test_user_errors.py:{here}, in test_frames_of_python_and_of_installed_packages"
    assert re.search(where, str(message(outer.value)))


@pytest.mark.quick("tiny-nonsense")
@pytest.mark.parametrize(
    ("name", "platforms"),
    [("tiny", "nonsense"), ("arrays", "cuda"), slow("tiny", "cuda"), slow("arrays", "nonsense")],
)
def test_a_platform_that_is_not_here(name, platforms, folder):
    with open(folder / "steps.py", "a") as file:
        file.write("def arrays(): return build, jnp.zeros((2, 8, 8)), jnp.zeros((16, 8))\n")
    environment = children.finding_packages() | {"JAX_PLATFORMS": platforms}
    line = "-m", "jaxmem", "plan", f"steps:{name}"
    done = children.python(*line, environment=environment, check=False)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert f"JAX_PLATFORMS is '{platforms}', and JAX finds no such device here" in last
    assert "set it to what this machine has, such as cpu, or unset it" in last
    assert "Traceback" not in done.stderr
