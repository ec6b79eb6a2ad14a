"""Where states lie, and the lanes of a step, on the page and in a notebook."""

import re

from jaxmem._core.bytes import show_bytes
from jaxmem._model.states.places import HOST, Places
from jaxmem._train.report.timeline import places_figure
from tests.shared.report_pages import made, page_of, write_run
from tests.shared.timelines import timeline

PLACES = Places(24, 6, 6, 6, HOST)


def placed(**other):
    return made(lanes=timeline(**other), places=PLACES)


def test_a_page_shows_both_and_one_without_lanes_neither(tmp_path):
    text = page_of(tmp_path, write_run(tmp_path / "run", placed()))
    assert text.index("Where states lie") < text.index("Lanes of a step")
    assert f"in their order: {PLACES}." in text
    assert text.count("; exposed, which no work hides: ") == 2, "a screen reader is told"
    plain = page_of(tmp_path, write_run(tmp_path / "plain", made()))
    assert "Where states lie" not in plain
    assert "Lanes of a step" not in plain


def test_the_table_of_places_adds_up():
    figure = places_figure(placed())
    rows = re.findall(r'device">([^<]*)</td><td data-label="in host memory">([^<]*)</td>', figure)
    own = timeline()
    here = [group.count * group.device_bytes for group in own.groups]
    there = [group.count * group.host_bytes for group in own.groups]
    sizes = [*zip(here, there), (0, own.outer_host_bytes)]
    sizes.append((sum(here), sum(there) + own.outer_host_bytes))
    assert rows == [(show_bytes(a), show_bytes(b)) for a, b in sizes]
    widths = re.findall(r'class="p-(\w+)"[^>]* d="M([\d.]+) 0h([\d.]+)v1', figure)
    assert widths == [(g.place, f"{25 * i:.3f}", "25.000") for i, g in enumerate(own.groups)]
