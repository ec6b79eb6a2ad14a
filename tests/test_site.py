"""`make docs`: the pages and the API reference become one site, without a warning, that asks
nothing of a network.
"""

import html.parser
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Links(html.parser.HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if given.get("id"):
            self.anchors.add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in LOADED and given.get(LOADED[tag]):
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[pathlib.Path, Links]:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    assert "WARNING" not in built.stderr, built.stderr[-2000:]
    pages = [page for page in folder.rglob("*.html") if page.name != "404.html"]
    return {page: Links(page.read_text(encoding="utf-8")) for page in pages}


def is_elsewhere(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))


def test_no_page_loads_anything_from_a_network(site):
    assert len(site) > 15
    for page, links in site.items():
        assert [address for address in links.loaded if is_elsewhere(address)] == [], page
        for address in links.loaded:
            assert (page.parent / address.split("?")[0]).exists(), (page, address)


def test_every_link_leads_to_a_place_of_the_site(site):
    known = {page.resolve(): links for page, links in site.items()}
    for page, links in known.items():
        for address in links.links:
            if is_elsewhere(address):
                continue
            path, _, anchor = address.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target in known, (page, address)
            assert anchor in known[target].anchors, (page, address)


def test_the_reference_has_signatures_and_prose(site):
    (page,) = (page for page in site if page.match("api/jaxmem.html"))
    assert {"jaxmem.plan", "jaxmem.Plan.load", "jaxmem.tag"} <= site[page].anchors
    text = page.read_text(encoding="utf-8")
    assert "the actions under which a training step fits a byte budget" in text
    assert "<li><code>budget</code>: bytes of the whole step" in text, "arguments are a list"


def test_search_works_from_a_file(site):
    """The theme takes its worker from the site, and the index is a script that a page can load."""
    (home,) = (page for page in site if page.name == "index.html" and page.parent.name != "api")
    assert "assets/iframe-worker.js" in site[home].loaded
    assert (home.parent / "search" / "search_index.js").read_text("utf-8").startswith("var __index")
