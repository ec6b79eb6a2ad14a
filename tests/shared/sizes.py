"""Lines of code by folder, without blank lines, comments and docstrings, and the library's types.

python -m tests.shared.sizes
"""

import ast
import collections
import functools
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jaxmem", "kernels", "experiments", "benchmarks", "tests")
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Returns the number of lines with code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            found.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(found)


def lines_of(folder: str) -> int:
    """Returns the lines of code of a folder of the repository."""
    return sum(code_lines(p.read_text("utf-8")) for p in (ROOT / folder).rglob("*.py"))


@functools.cache
def nodes(folder: str) -> list[ast.AST]:
    """Returns the nodes of a folder's classes, and of its calls."""
    trees = (ast.parse(p.read_text("utf-8")) for p in (ROOT / folder).rglob("*.py"))
    kinds = ast.ClassDef, ast.Call
    return [n for tree in trees for n in ast.walk(tree) if isinstance(n, kinds)]


def classes(folder: str) -> list[ast.ClassDef]:
    return [n for n in nodes(folder) if isinstance(n, ast.ClassDef)]


# Words in the decorators and bases of types that are declared by their fields.
RECORDS = re.compile(r"dataclass|NamedTuple|TypedDict|Enum\b|GradientTransformation")
MAKERS = re.compile(r"namedtuple|make_dataclass|NamedTuple|TypedDict|\w*Enum")


def records(folder: str) -> int:
    """Returns the number of dataclasses, named tuples, typed dicts and enumerations, of classes
    that inherit from them, and of calls that make one.
    """
    words = lambda c: [ast.unparse(node) for node in (*c.decorator_list, *c.bases)]
    found: set[str] = set()
    every = {c.name: words(c) for c in classes(folder)}
    while new := {
        name
        for name, texts in every.items()
        if name not in found and any(RECORDS.search(t) or t in found for t in texts)
    }:
        found |= new
    calls = (n.func for n in nodes(folder) if isinstance(n, ast.Call))
    return len(found) + sum(bool(MAKERS.fullmatch(ast.unparse(f).split(".")[-1])) for f in calls)


def named_twice(folder: str) -> dict[str, int]:
    """Returns the class names that are defined more than once, with their counts."""
    counts = collections.Counter(c.name for c in classes(folder))
    return {name: n for name, n in sorted(counts.items()) if n > 1}


def main() -> None:
    for folder in FOLDERS:
        print(f"{folder}: {lines_of(folder)} lines of code")
    print(f"jaxmem: {records('jaxmem')} record types, named twice: {named_twice('jaxmem')}")


if __name__ == "__main__":
    main()
