"""docs/troubleshooting.md has an entry for every error and warning that jaxmem raises, read from
the sources without importing them.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import jaxmem
from jaxmem import errors

pytestmark = pytest.mark.core

SOURCES = pathlib.Path(jaxmem.__file__).parent
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "troubleshooting.md"
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}


class Said(NamedTuple):
    where: str
    text: str  # of the message, "…" for what is filled in


def said_in(path: pathlib.Path) -> Iterator[Said]:
    """Every message that a file gives to an error or a warning of jaxmem."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    } | {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.Module):
            for call in _calls(function):
                if call.args and _name(call.func) in ERRORS | {"warn"}:
                    where = f"{path.relative_to(SOURCES)}:{call.lineno}"
                    yield Said(where, _text(call.args[0], known | _assigned(function)))


def _assigned(function: ast.FunctionDef | ast.Module) -> dict[str, ast.AST]:
    """The last value of each name that a function assigns."""
    if isinstance(function, ast.Module):
        return {}
    return {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    """The calls in a function, those of functions within it left out."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef):
            if isinstance(node, ast.Call):
                yield node
            yield from _calls(node)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _text(node: ast.AST, known: dict[str, ast.AST]) -> str:
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(_text(value, known) for value in node.values)
        case ast.BinOp():
            return _text(node.left, known) + _text(node.right, known)
        case ast.FormattedValue(value=ast.Name(id=name)) | ast.Name(id=name) if name in known:
            rest = {n: v for n, v in known.items() if n != name}
            return _text(known[name], rest)
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            return re.sub(r"{\w+}", "…", _text(text, known))
        case ast.Call(func=ast.Name(id=name)) if isinstance(known.get(name), ast.FunctionDef):
            function = known[name]
            returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
            local = _assigned(function)
            return "\n".join(_text(value, local) for value in returned if value is not None)
    return "…"


def covers(entry: str, text: str) -> bool:
    """Whether the words of an entry stand in a message, in their order."""
    return re.search(".*".join(map(re.escape, entry.split("…"))), text, re.S) is not None


def entries() -> list[str]:
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.M)
    return [row.strip("…: ") for row in rows if row != "It says"]


@functools.cache
def messages() -> list[Said]:
    return [said for path in sorted(SOURCES.rglob("*.py")) for said in said_in(path)]


HANDED_ON = {"…", "jaxmem: …"}  # messages that another file wrote


def test_messages_are_read_from_the_sources():
    assert len(messages()) > 100
    texts = [said.text for said in messages()]
    assert any("and the least that compiled is" in text for text in texts), "a local variable"
    assert any("no jax.checkpoint region with a jaxmem policy …" in text for text in texts)
    assert any("no longer knows the V100" in text for text in texts), "what a function returns"
    blank = {said.where.split(":")[0] for said in messages() if said.text in HANDED_ON}
    assert blank == {"_core/warn.py", "_model/tags/primitive.py", "_planner/plan.py"}


def test_every_message_has_an_entry():
    known = entries()
    missing = [
        said
        for said in messages()
        if said.text not in HANDED_ON and not any(covers(entry, said.text) for entry in known)
    ]
    assert missing == [], "write a row: what it says, its cause, its remedy"


@pytest.mark.parametrize(
    ("entry", "text", "is_covered"),
    [
        ("plan: `build` is …", "plan: `build` is …; expected a function", True),
        ("plan: `build` is …", "plan: `build` returned …", False),
        ("… holds … layers", "stack: … holds … layers, and …", True),
        ("layers … holds", "stack: … holds … layers, and …", False),
    ],
)
def test_entries_cover_messages_in_the_order_of_their_words(entry, text, is_covered):
    assert covers(entry, text) is is_covered


def test_every_error_has_a_section():
    text = PAGE.read_text(encoding="utf-8")
    assert {name for name in ERRORS if f"`{name}`" not in text} == set()
