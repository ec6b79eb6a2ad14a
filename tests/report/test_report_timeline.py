"""Where states lie, and the lanes of a step, on the page and in a notebook."""

import re

import pytest

from jaxmem._core.bytes import show_bytes
from jaxmem._model.states.places import HOST, Places
from jaxmem._result.plan.timeline import LANES
from jaxmem._train.report.timeline import lanes_figure, places_figure
from tests.shared.report_pages import check, made, page_of, write_run
from tests.shared.timelines import timeline

pytestmark = pytest.mark.core
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
    assert widths == [
        (group.place, f"{25 * i:.3f}", "25.000") for i, group in enumerate(own.groups)
    ]


def test_colours_of_lanes_are_those_of_their_order_in_every_panel():
    figure = lanes_figure(placed())
    used = [(i, lane) for i, lane in enumerate(LANES) if placed().lanes.lane_seconds()[lane.key]]
    assert len(used) == 4, "nothing crosses between devices"
    assert "each of the first 3 microbatches" in figure
    for panel in figure.split("<h4>")[1:]:
        names = re.findall(r'class="name">([^<]+)</span>', panel)
        assert names == [*(lane.name for _, lane in used), "exposed", "ms"]
        marks = dict(
            re.findall(r'class="lane (s\d)"[^>]*><title>[^<]*: ([a-z -]+) [\d.]+ ms', panel)
        )
        assert marks == {f"s{i}": lane.name for i, lane in used}
    one = lanes_figure(placed(microbatches=1))
    assert "<h4>" not in one
    resident = lanes_figure(placed(places=("copied",), microbatches=2))
    assert "to the host" not in resident.partition("<table")[0], "an idle lane is left out"


def test_layers_that_share_marks_are_told():
    assert "share a mark" not in lanes_figure(placed())
    assert "up to 3 share a mark" in lanes_figure(placed(each=120))


def test_a_notebook_shows_the_same_marks():
    text = placed()._repr_html_()
    check(text)
    paths = lambda html: re.findall(r'<path class="lane[^>]*>', html)
    assert paths(text) == paths(lanes_figure(placed()))
    assert "layers 7 to 12, in host memory, a copy on the device: 114.4 MiB on the device," in text
    assert "<script" not in text
    assert "<style" not in text
