"""experiments/ and benchmarks/, read from their sources: mains and files are short, benchmarks are
scripts and what they share, and every text says its encoding.
"""

import ast
import re

import pytest

from tests.shared.sources import PATHS, in_package, tree_of

pytestmark = pytest.mark.core


def test_benchmarks_are_scripts_and_what_they_share():
    scripts = [m for m in in_package("benchmarks") if re.fullmatch(r"benchmarks\.[a-z]\w*", m)]
    scripts.remove("benchmarks.shared")
    assert len(scripts) > 10
    assert all(f"python -m {m}" in ast.get_docstring(tree_of(m)) for m in scripts)
    assert all("__main__" in PATHS[m].read_text("utf-8") for m in scripts)


def texts(tree: ast.Module):
    """Calls that read or write text: in the encoding of the machine, unless they say which."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        arguments = " ".join(map(ast.unparse, node.args)) + keywords.get("mode", "")
        binary = "'rb'" in arguments or "'wb'" in arguments
        opens = name in ("open", "TemporaryFile") and not binary
        runs = "text" in keywords and name in ("run", "Popen")
        if ast.unparse(node.func) == "Image.open":
            continue
        if opens or runs or name in ("read_text", "write_text"):
            yield node.lineno, keywords


def test_texts_say_their_encoding():
    without = [
        f"{module}:{line}"
        for module in in_package("experiments") + in_package("benchmarks")
        for line, keywords in texts(tree_of(module))
        if "encoding" not in keywords
    ]
    assert without == []


def test_a_text_without_an_encoding_is_found():
    source = "a.read_text()\nopen('x')\nopen('x', 'rb')\nb.write_text(1, encoding='utf-8')\n"
    source += "subprocess.run(x, text=True)\nsubprocess.run(x)"
    assert [line for line, k in texts(ast.parse(source)) if "encoding" not in k] == [1, 2, 5]
