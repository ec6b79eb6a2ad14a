"""The import direction of CONTRIBUTING.md, read from the sources without importing them."""

import ast
import pathlib
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.core

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("jaxmem", "kernels", "experiments", "benchmarks", "tests")
FIRST_PARTY = ("jaxmem", "jaxmem_kernels", "experiments", "benchmarks", "tests")
NO_JAX = (
    "_types",
    "_errors",
    "_solve",
    "_program",
    "_demand",
    "_check",
    "_greedy",
    "_evaluate",
    "_memory_model",
)
JAX_INTERNALS = {"jaxmem._tags.tag", "jaxmem._jax.jaxpr", "jaxmem._jax.export"}


class Import(NamedTuple):
    module: str  # the dotted name that is reached: `from jax import extend` gives jax.extend
    top: bool  # runs when the file is imported


def runs_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node outside functions and `if TYPE_CHECKING:`."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def imports(source: str) -> set[Import]:
    """Modules and names that a source imports, and the attributes it reaches through them, as
    `jax.extend.core`.
    """
    tree = ast.parse(source)
    top = {id(node) for node in runs_at_import(tree)}
    found, names = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {Import(alias.name, id(node) in top) for alias in node.names}
            names |= {
                alias.asname or alias.name.split(".")[0]: alias.name
                if alias.asname
                else alias.name.split(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {
                Import(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names
            }
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in names and rest.replace(".", "").isidentifier():
                found.add(Import(f"{names[head]}.{rest}", id(node) in top))
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def module_of(path: pathlib.Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {
    module_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
}
IMPORTS = {module: imports(path.read_text()) for module, path in PATHS.items()}

EXPORTED = {
    alias.asname or alias.name: alias.asname == alias.name
    for node in ast.parse(PATHS["jaxmem._public"].read_text()).body
    if isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names
}
PUBLIC = {name for name, again in EXPORTED.items() if again}  # re-exported as `X as X`


def in_package(package: str) -> list[str]:
    return [module for module in PATHS if within(module, package)]


def ours(name: str) -> str | None:
    """The file that an imported name lives in: jaxmem._core.actions.KEEP lives in
    jaxmem._core.actions.
    """
    while name and name not in PATHS:
        name = name.rpartition(".")[0]
    return name or None


def top_level_dependencies(module: str) -> set[str]:
    return {
        file for name, top in IMPORTS[module] if top and (file := ours(name)) and file != module
    }


def reached(module: str) -> set[str]:
    """Every file of ours that importing one makes run, packages' own __init__ left out."""
    seen, todo = {module}, [module]
    while todo:
        todo += (new := top_level_dependencies(todo.pop()) - seen)
        seen |= new
    return seen


def violations(modules, forbidden) -> list[str]:
    return [
        f"{m} imports {name}" for m in modules for name, _ in sorted(IMPORTS[m]) if forbidden(name)
    ]


def private(name: str) -> bool:
    """A name of jaxmem that is neither public nor an attribute of a public one; the command's
    module is public too.
    """
    head, _, rest = name.partition(".")
    return (
        head == "jaxmem"
        and rest != ""
        and (rest.split(".")[0] not in PUBLIC | {"cli"} or "._" in name)
    )


def test_every_package_is_looked_at():
    assert all(
        in_package(package) for package in ("jaxmem", "jaxmem_kernels", "experiments", "tests")
    )
    assert {
        "jaxmem._core.actions",
        "jaxmem.errors",
        "jaxmem._tags.tag",
        "jaxmem._jax.jaxpr",
    } <= set(PATHS)


def test_the_words_and_the_errors_import_nothing_of_ours_but_each_other():
    words = ["jaxmem._core.actions", "jaxmem.errors"]
    assert (
        violations(words, lambda name: within(name, *FIRST_PARTY) and not within(name, *words))
        == []
    )


def test_planning_is_free_of_jax():
    planning = [
        m
        for m in in_package("jaxmem")
        if any(within(m, f"jaxmem.{n}") or m.startswith(f"jaxmem.{n}_") for n in NO_JAX)
    ]
    assert len(planning) >= len(NO_JAX)
    files = {file for module in planning for file in reached(module)}
    assert (
        violations(sorted(files), lambda name: within(name, "jax", "jaxlib", "flax", "optax")) == []
    )


def test_kernels_never_import_jaxmem():
    assert (
        violations(in_package("jaxmem_kernels"), lambda name: within(name, "jaxmem", "experiments"))
        == []
    )


def test_the_library_never_imports_what_is_built_on_it():
    above = ("experiments", "benchmarks", "tests", "flax", "optax", "pydantic")
    adapters = ["jaxmem.layers"]  # of Flax modules, which import Flax when they are called
    optimizers = [
        "jaxmem._adama.transform",
        "jaxmem._adama.rule",
        "jaxmem._adama.step",
        "jaxmem._adama.gather",
    ]  # optax transformations
    others = [module for module in in_package("jaxmem") if module not in adapters + optimizers]
    assert violations(others, lambda name: within(name, *above)) == []
    assert (
        violations(optimizers, lambda name: within(name, *above) and not within(name, "optax"))
        == []
    )
    assert (
        violations(adapters, lambda name: within(name, *above) and not within(name, "flax")) == []
    )
    assert not any(
        within(name, "flax") for module in adapters for name, top in IMPORTS[module] if top
    )


@pytest.mark.parametrize("package", ["experiments"])
def test_users_of_the_library_import_only_its_public_names(package):
    assert violations(in_package(package), private) == []


def test_experiments_never_import_benchmarks_or_tests():
    assert (
        violations(in_package("experiments"), lambda name: within(name, "benchmarks", "tests"))
        == []
    )


def test_few_files_touch_jax_internals():
    others = [module for module in in_package("jaxmem") if module not in JAX_INTERNALS]
    others += [
        m for m in in_package("jaxmem_kernels") if m != "jaxmem_kernels.dispatch"
    ]  # which makes primitives
    others += in_package("experiments") + in_package("benchmarks")
    assert violations(others, lambda name: within(name, "jax.extend", "jax.interpreters")) == []
    assert violations(PATHS, lambda name: within(name, "jax._src", "jaxlib")) == []


def test_no_import_cycles():
    cycles = [
        m for m in PATHS for dependency in top_level_dependencies(m) if m in reached(dependency)
    ]
    assert cycles == []


def test_files_are_short():
    lengths = {
        m: len(PATHS[m].read_text().splitlines())
        for m in in_package("jaxmem") + in_package("jaxmem_kernels")
    }
    assert {module: length for module, length in lengths.items() if length > 300} == {}
    assert statistics.median(lengths.values()) <= 150


def test_public_names_are_few_and_marked_as_public():
    assert {"plan", "Plan", "tag", "remat_policy"} <= PUBLIC
    assert len(PUBLIC) <= 20
    assert [name for name in EXPORTED if name not in PUBLIC and not name.startswith("_")] == []


@pytest.mark.parametrize(
    ("source", "name", "top"),
    [
        ("import jax._src.core", "jax._src.core", True),
        ("from jax import extend as e", "jax.extend", True),
        ("import jax as j\nj.extend.core.Var", "jax.extend.core.Var", True),
        ("import jaxmem\ndef f(): return jaxmem._plan.plan.x", "jaxmem._plan.plan.x", False),
        ("def f():\n from jaxmem._plan.plan import plan", "jaxmem._plan.plan.plan", False),
        ("class A:\n import jax", "jax", True),
        ("if TYPE_CHECKING:\n import jax\nelse:\n import numpy", "jax", False),
        ("if TYPE_CHECKING:\n import jax\nelse:\n import numpy", "numpy", True),
    ],
)
def test_imports_are_found(source, name, top):
    assert Import(name, top) in imports(source)


@pytest.mark.parametrize(
    ("name", "is_private"),
    [
        ("jaxmem", False),
        ("jaxmem.plan", False),
        ("jaxmem.codecs.parse", False),
        ("jaxmem._plan.plan", True),
    ]
    + [
        ("jaxmem._plan.plan.plan", True),
        ("jaxmem.codecs._table", True),
        ("jaxmem.secret", True),
        ("jax._src", False),
    ],
)
def test_private_names_are_known(name, is_private):
    assert private(name) == is_private
