"""docs/versions.md lists the code that exists because of a version. Like test_architecture.py, this
file reads the sources.
"""

import collections
import pathlib
import re
import tokenize

import pytest

pytestmark = pytest.mark.core

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "versions.md").read_text("utf-8")


def commented(path: pathlib.Path) -> list[str]:
    """The rule of each comment `Remove with RULE: ...` of a file."""
    with path.open("rb") as source:
        tokens = [*tokenize.tokenize(source.readline)]
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return [rule for text in comments for rule in re.findall(r"^# Remove with ([^:]+): \S", text)]


def test_each_workaround_is_in_the_table():
    rows = re.findall(r"^\| .+ \| .+ \| `(\S+\.py)` \| (.+) \|$", PAGE, re.M)
    assert [path for path, _ in rows if not (ROOT / path).exists()] == []
    folders = ("jaxmem", "kernels", "experiments")
    files = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    mentions = {p: n for p in files if (n := p.read_text("utf-8").count("Remove with"))}
    found = [(str(p.relative_to(ROOT)), rule) for p in mentions for rule in commented(p)]
    assert len(found) == sum(mentions.values()), "expected `# Remove with RULE: reason`"
    assert collections.Counter(found) == collections.Counter(rows)


def test_each_rule_of_removal_is_explained():
    rules = re.findall(r"^\| .+ \| .+ \| `\S+\.py` \| (.+) \|$", PAGE, re.M)
    explained = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", PAGE, re.M)
    assert len(rules) > 30
    assert {*rules} == {*explained} - {"Removed with"}
