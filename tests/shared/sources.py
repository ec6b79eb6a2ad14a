"""Files of the repository by module, and the imports of each file, imports inside functions
included. Sources are read without importing them.
"""

import ast
import functools
import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jaxmem", "kernels", "experiments", "benchmarks", "tests")


class Import(NamedTuple):
    module: str  # the imported dotted name: `from jax import extend` gives jax.extend
    top: bool | None  # whether it runs when the file is imported; None: only type checkers read it


def when(tree: ast.Module) -> dict[int, bool | None]:
    """Returns, by node, whether it runs at import; None if only type checkers read it."""
    found: dict[int, bool | None] = {}

    def mark(node: ast.AST, runs: bool | None) -> None:
        found[id(node)] = runs
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in (*node.body, node.test):
                mark(child, None)
            for child in node.orelse:
                mark(child, runs)
            return
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            mark(child, False if inside and runs else runs)

    mark(tree, True)
    return found


def imports(tree: ast.Module) -> set[Import]:
    """Returns the modules and names that a source imports, and the attributes that it reads from
    them, such as `jax.extend.core`.
    """
    top = when(tree)
    found: set[Import] = set()
    names: dict[str, tuple[str, bool | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(Import(alias.name, top[id(node)]))
                head = alias.name.split(".")[0]
                whole = alias.name if alias.asname else head
                names[alias.asname or head] = whole, top[id(node)]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(Import(name, top[id(node)]))
                names[alias.asname or alias.name] = name, top[id(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, rest = dotted(node)
            if head in names:
                name, runs = names[head]
                found.add(Import(f"{name}.{rest}", None if runs is None else top[id(node)]))
    return found


def dotted(node: ast.Attribute) -> tuple[str | None, str]:
    """Returns `jax`, `extend.core` for `jax.extend.core`; None first if it starts with no name."""
    attributes, value = [node.attr], node.value
    while isinstance(value, ast.Attribute):
        attributes.append(value.attr)
        value = value.value
    return getattr(value, "id", None), ".".join(reversed(attributes))


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def module_of(path: pathlib.Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {
    module_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(PATHS[module].read_text("utf-8"))


@functools.cache
def imports_of(module: str) -> set[Import]:
    return imports(tree_of(module))


def in_package(package: str) -> list[str]:
    return [module for module in PATHS if within(module, package)]


def ours(name: str) -> str | None:
    """Returns the file of a name: `jaxmem._core.actions` for `jaxmem._core.actions.Choice`."""
    while name and name not in PATHS:
        name = name.rpartition(".")[0]
    return name or None


def dependencies(module: str) -> set[str]:
    """Returns the files of this repository that a file imports, at its top or inside functions.

    `import jaxmem` itself only silences messages of plugins.
    """
    names = (name for name, top in imports_of(module) if top is not None)
    return {file for name in names if (file := ours(name))} - {module, "jaxmem"}


def room(module: str) -> str:
    """Returns the package or the file of jaxmem or experiments that contains a file."""
    return (module.split(".") + [""])[1]
