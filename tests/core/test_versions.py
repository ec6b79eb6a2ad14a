"""Versions are read as numbers, release candidates included. docs/versions.md lists the code that
exists because of a version.
"""

import collections
import pathlib
import re
import tokenize

import pytest

from jaxmem._core.versions import installed, release

pytestmark = pytest.mark.core

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.12.0", (0, 12, 0)),
        ("0.12.0rc1", (0, 12, 0)),
        ("0.12.0.1", (0, 12, 0, 1)),
        ("0.11.2.dev20260101+abc", (0, 11, 2)),
        ("1!2.0.post3", (2, 0, 0)),
        ("v3", (3, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_a_version_is_its_numbers(text, numbers):
    assert release(text) == numbers


def test_what_is_not_installed_has_none():
    assert installed("jax") is not None
    assert installed("no-such-package-of-this-name") is None


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
