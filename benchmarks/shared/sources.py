"""The sources that a result depends on: the files that its script imports, and whether their code
has changed since a commit.

Imports are followed from file to file in the syntax trees, those inside functions too, and those in
strings that a benchmark runs in another process. One import is not followed as Python runs it:
`import jaxmem` would reach every file by `_public.py`. Only the public names that a file uses are
followed to the files that define them. A config is a source of each benchmark that names it, and a
table in TOML of each file in its folder that names it.

This file imports no JAX.
"""

import ast
import functools
import io
import pathlib
import re
import subprocess
from collections.abc import Iterator

from tests.shared.sizes import DOCUMENTED
from tests.shared.sources import imports

ROOT = pathlib.Path(__file__).parents[2]
# The folder that holds each package.
FOLDERS = {"jaxmem_kernels": "kernels"}
FOLDERS |= dict.fromkeys(("jaxmem", "experiments", "benchmarks", "tests"), ".")
# Files that no measured number depends on; `jaxmem/__init__.py` imports everything.
APART = "jaxmem/__init__.py", "benchmarks/shared/sources.py"
NAMED = re.compile(rf"\b(?:{'|'.join(FOLDERS)})(?:\.\w+)+")


def git(root: pathlib.Path, *arguments: str, given: str = "") -> str | None:
    """What git prints; None without git, without a repository, or where the command fails."""
    command, data = ["git", "-C", str(root), *arguments], given.encode()
    try:
        done = subprocess.run(command, input=data, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode()


_parsed, _names_in = functools.cache(ast.parse), functools.cache(imports)


def _strings(tree: ast.Module) -> Iterator[str]:
    """The strings of a file that are no docstrings."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documents:
            yield str(node.value)


@functools.cache
def code(path: str, text: str) -> str:
    """A file without comments and docstrings; files that are not Python's as they are."""
    if not path.endswith(".py"):
        return text
    tree = ast.parse(text)  # not the cached tree, since its docstrings are removed
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


class Sources:
    """The sources of a working tree."""

    def __init__(self, root: pathlib.Path = ROOT):
        self.root = root

    def _text(self, path: str) -> str:
        file = self.root / path
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @functools.cached_property
    def _public(self) -> dict[str, str]:
        """The dotted name of a public name of jaxmem, where it is defined."""
        found = (one.module for one in imports(ast.parse(self._text("jaxmem/_public.py"))))
        return {name.rpartition(".")[2]: name for name in found}

    def _file(self, name: str) -> str | None:
        """The path of the file that defines a dotted name of this repository."""
        head, _, rest = name.partition(".")
        public = self._public.get(rest.partition(".")[0]) if head == "jaxmem" else None
        name, base = public or name, self.root / FOLDERS.get(head, "absent")
        while name:
            path = base / name.replace(".", "/")
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    return file.relative_to(self.root).as_posix()
            name = name.rpartition(".")[0]
        return None

    @functools.cache  # noqa: B019 (as many as files)
    def _imports(self, path: str) -> frozenset[str]:
        """Paths of the files that a file imports, of the configs that a benchmark names, and of the
        tables that a file names.
        """
        if not path.endswith(".py"):
            return frozenset()
        tree, folder = _parsed(self._text(path)), pathlib.PurePosixPath(path).parent
        found = {self._file(one.module) for one in _names_in(tree)}
        tables = (str(folder / text) for text in _strings(tree) if text.endswith(".toml"))
        found |= {table for table in tables if (self.root / table).is_file()}
        for text in _strings(tree) if path.startswith("benchmarks/") else ():
            found |= {self._file(module) for module in NAMED.findall(text)}
            found |= {self._config(word) for word in re.findall(r"\w+", text)}
        return frozenset(p for p in found if p is not None and p not in APART)

    def _config(self, name: str) -> str | None:
        path = f"configs/{name}.toml"
        return path if (self.root / path).exists() else None

    def imported(self, path: str) -> frozenset[str]:
        """Paths of the files that a file imports, itself and those that these import included."""
        found, left = set[str](), [path]
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                left += self._imports(one)
        return frozenset(found)

    def script_of(self, result: str) -> str | None:
        """The path of the script that writes a result: the one whose table has the result's name,
        or the script of that name.
        """
        named = re.compile(rf"\b{result}\b.: Benchmark\(")
        for file in sorted((self.root / "benchmarks").glob("*.py")):
            path = file.relative_to(self.root).as_posix()
            if named.search(self._text(path)) or file.stem == result:
                return path
        return None

    @functools.cache  # noqa: B019
    def _differ(self, commit: str) -> frozenset[str] | None:
        """Paths of the files that differ from a commit's; None if git does not know the commit."""
        listed = git(self.root, "diff", "--name-only", "--no-renames", commit)
        return None if listed is None else frozenset(listed.splitlines())

    def _texts(self, commit: str, paths: frozenset[str]) -> Iterator[tuple[str, str | None]]:
        """Files of a commit, by path, each with its text; None where the commit has no such file.
        One process reads all: a process for each would take most of a listing's time.
        """
        named = "\n".join(f"{commit}:{path}" for path in paths)
        found = git(self.root, "cat-file", "--batch", given=named) or ""
        stream = io.BytesIO(found.encode())  # since git prints sizes in bytes
        for path in paths:
            size = stream.readline().split()[2:]  # none: a clone may lack the blob too
            yield path, stream.read(int(size[0])).decode() if size else None
            stream.readline() if size else None

    def changed(self, script: str, commit: str) -> list[str] | None:
        """Sources of a script whose code is not the code of a commit; None if git does not know the
        commit.
        """
        differ = self._differ(commit)
        if differ is None:
            return None
        texts = self._texts(commit, self.imported(script) & differ)
        same = lambda p, text: text is not None and code(p, text) == code(p, self._text(p))
        return sorted(p for p, text in texts if not same(p, text))

    def record(self, script: str) -> dict:
        """What a result says of its sources: the commit, and whether their code differs from it."""
        commit = git(self.root, "rev-parse", "HEAD")
        if commit is None:
            return {"commit": None, "dirty": None}
        return {"commit": commit.strip(), "dirty": bool(self.changed(script, commit.strip()))}
