"""The sources that a result depends on: the rooms that its script imports, and a hash of each.

A room is the first two parts of a file's path: `jaxmem/_core`, `experiments/models`,
`benchmarks/shared`, `benchmarks/solver.py`. Imports are followed from file to file in the syntax
trees, those inside functions too, and those in strings that a benchmark runs in another process.
One import is not followed as Python runs it: `import jaxmem` would reach every room by
`_public.py`. Only the public names that a file uses are followed to the files that define them.

This file imports no JAX.
"""

import ast
import functools
import hashlib
import pathlib
import re
import subprocess
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
# The folder that holds each package.
FOLDERS = {"jaxmem_kernels": "kernels"}
FOLDERS |= dict.fromkeys(("jaxmem", "experiments", "benchmarks", "tests"), ".")
NAMED = re.compile(rf"\b(?:{'|'.join(FOLDERS)})(?:\.\w+)+")
# Files that a source reads by name, not by an import.
READ = {"experiments/command/load.py": "configs"}
KINDS = ".py", ".toml"


def git(root: pathlib.Path, *arguments: str) -> str | None:
    """What git prints; None without git, without a repository, or where the command fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, check=True, encoding="utf-8"
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def room_of(path: str) -> str:
    """The room of a file, by its path from the repository's root."""
    return "configs" if path.startswith("configs/") else "/".join(path.split("/")[:2])


class Sources:
    """The sources of a working tree."""

    def __init__(self, root: pathlib.Path = ROOT):
        self.root = root

    @functools.cached_property
    def files(self) -> list[str]:
        """Paths of all sources that git does not ignore, or of all without git."""
        tracked = git(self.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        if tracked is None:
            paths = (p.relative_to(self.root).as_posix() for p in self.root.rglob("*"))
            found = [p for p in paths if not p.startswith(".")]
        else:
            found = [p for p in tracked.split("\0") if (self.root / p).is_file()]
        return sorted(p for p in found if p.endswith(KINDS))

    @functools.cached_property
    def _public(self) -> dict[str, str]:
        """The module that defines a public name of jaxmem."""
        path = self.root / "jaxmem" / "_public.py"
        tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        return {
            alias.name: f"jaxmem.{alias.name}" if node.module == "jaxmem" else str(node.module)
            for node in found
            for alias in node.names
        }

    def _file(self, module: str) -> str | None:
        """The path of a module of this repository."""
        folder = FOLDERS.get(module.split(".")[0])
        if folder is None:
            return None
        base = (self.root / folder).joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path.relative_to(self.root).as_posix()
        return None

    @functools.cache  # noqa: B019 (as many as files)
    def _imports(self, path: str) -> frozenset[str]:
        """Paths of the files that a file imports."""
        found = set(map(self._file, self._named(path)))
        return frozenset(p for p in found if p is not None and p != "jaxmem/__init__.py")

    def _named(self, path: str) -> Iterator[str]:
        """Modules that a file names."""
        tree = ast.parse((self.root / path).read_text(encoding="utf-8"))
        is_benchmark = path.startswith("benchmarks/")
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name != "jaxmem")
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield str(node.module)
                    yield f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxmem":
                yield self._public.get(node.attr, "")
            elif is_benchmark and isinstance(node, ast.Constant) and id(node) not in documents:
                yield from NAMED.findall(str(node.value))

    def imported(self, path: str) -> frozenset[str]:
        """Paths of the files that a file imports, itself and those that these import included."""
        found, left = set[str](), [path]
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                left += self._imports(one)
        return frozenset(found)

    def rooms(self, path: str) -> list[str]:
        """The rooms that a script imports."""
        files = self.imported(path)
        return sorted({*map(room_of, files), *(READ[p] for p in files & READ.keys())})

    @functools.cache  # noqa: B019
    def digest(self, room: str) -> str:
        """A hash of the paths and the contents of a room's files."""
        total = hashlib.sha256()
        for path in self.files:
            if room_of(path) == room:
                content = (self.root / path).read_bytes()
                total.update(f"{path}\0{len(content)}\0".encode() + content)
        return total.hexdigest()

    def script_of(self, result: str) -> str | None:
        """The path of the script that writes a result: the one whose table has the result's name,
        or the script of that name.
        """
        named = re.compile(rf"\b{result}\b.: Benchmark\(")
        paths = [p for p in self.files if re.fullmatch(r"benchmarks/\w+\.py", p)]
        text = lambda path: (self.root / path).read_text(encoding="utf-8")
        found = [p for p in paths if named.search(text(p)) or p == f"benchmarks/{result}.py"]
        return found[0] if found else None

    def record(self, script: str) -> dict:
        """What a result says of its sources. `dirty`: whether files differed from the commit's."""
        commit = git(self.root, "rev-parse", "HEAD")
        changed = git(self.root, "status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
        return {
            "commit": commit and commit.strip(),
            "dirty": None if changed is None else bool(changed),
            "sources": {room: self.digest(room) for room in self.rooms(script)},
        }
