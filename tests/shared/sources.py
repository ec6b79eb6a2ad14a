"""Files of the repository by module, and what each imports, read from the sources without importing
them: all imports, inside functions too.
"""

import ast
import functools
import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jaxmem", "kernels", "experiments", "benchmarks", "tests")


class Import(NamedTuple):
    module: str  # the dotted name that is reached: `from jax import extend` gives jax.extend
    top: bool | None  # runs when the file is imported; None: read by type checkers alone


def when(tree: ast.Module) -> dict[int, bool | None]:
    """By node: whether it runs when the file is imported, or for type checkers alone (None)."""
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
    """Modules and names that a source imports, and the attributes it reaches through them, as
    `jax.extend.core`.
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
    """`jax` and `extend.core` of `jax.extend.core`; None first where it starts from no name."""
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
    """The file of an imported name: `jaxmem._core.actions` of `jaxmem._core.actions.Choice`."""
    while name and name not in PATHS:
        name = name.rpartition(".")[0]
    return name or None


def dependencies(module: str) -> set[str]:
    """Every file of ours that a file imports, at its top or inside its functions.

    `import jaxmem` itself runs no more than a silencer of noise.
    """
    names = (name for name, top in imports_of(module) if top is not None)
    return {file for name in names if (file := ours(name))} - {module, "jaxmem"}


def room(module: str) -> str:
    """The package, or the file, of jaxmem or experiments that a file stands in."""
    return (module.split(".") + [""])[1]
