"""Hooks of mkdocs: README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site, so that
each is written once.
"""

import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files, config):
    for name, page in PAGES.items():
        files.append(
            File.generated(config, page, content=relinked((ROOT / name).read_text("utf-8")))
        )
    return files


def relinked(text: str) -> str:
    """Links that are written from the root, `](docs/plans.md)`, as they are from docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    for name, page in PAGES.items():
        text = re.sub(rf"\]\({re.escape(name)}([#)])", rf"]({page}\1", text)
    return text
