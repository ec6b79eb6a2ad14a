"""Memory over the schedule on the page: the areas are the data, and tags have one colour in both
programs.
"""

import dataclasses
import json
import re

import pytest

from jaxmem._result.memory.live import Live
from jaxmem._train.report.memory import live_figure
from tests.shared.explanations import MIB, made_explanation, made_live
from tests.shared.report_pages import HOSTILE, made, page_of, page_of_plan, write_run


def areas(figure: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Of each area its colour and its staircase, as (where it begins, its height) in percent."""
    found = []
    for css, path in re.findall(r'class="area (l-\w+)" d="M0 100([^"]*)H100V100Z"', figure):
        steps, at = [], 0.0
        for word, number in re.findall(r"([HV])(-?[\d.]+)", path):
            if word == "H":
                at = float(number)
            else:
                steps.append((at, 100 - float(number)))
        found.append((css, steps))
    return found


def height(steps, at: float) -> float:
    return [high for begin, high in steps if begin <= at][-1]


def test_areas_are_the_bytes_one_on_another():
    found = made_explanation()
    live = found.live
    assert live is not None
    drawn = areas(live_figure(found))
    assert [css for css, _ in drawn] == ["l-layer", "l-t1", "l-t0", "l-arguments"], "below on top"
    middle = [100 * (i + 0.5) / live.points for i in range(live.points)]
    totals = [height(drawn[0][1], at) for at in middle]
    scale = max(totals) / max(live.totals)
    assert totals == pytest.approx([scale * total for total in live.totals], abs=0.02)
    bottom = [height(drawn[-1][1], at) for at in middle]
    assert bottom == pytest.approx([scale * 10 * MIB] * live.points, abs=0.02)


def test_the_table_adds_up_to_what_compiled():
    figure = live_figure(made_explanation())
    rows = re.findall(r"</i>([^<]*)</th><td>([\d.]+) MiB</td>", figure)
    assert [name for name, _ in rows][:3] == ["arguments and model states", "up", "gelu"]
    free, compiled = re.findall(r"(?:packing|compiled)</th><td>([\d.]+) MiB", figure)
    assert sum(float(size) for _, size in rows) + float(free) == pytest.approx(float(compiled))


def test_without_a_history_nothing_is_drawn(tmp_path):
    found = dataclasses.replace(made_explanation(), live=None)
    assert live_figure(found) == ""
    assert "Memory over the step" not in page_of_plan(tmp_path, explained=found)


def test_a_run_and_a_call_show_it_and_names_from_files_are_text(tmp_path):
    live = made_live(tags=(HOSTILE,))
    found = made_explanation(live=live, target=HOSTILE)
    folder = write_run(tmp_path / "run", made())
    (tmp_path / "run" / "explained.json").write_text(json.dumps(found.to_json()))
    text = page_of(tmp_path, folder)
    assert "Memory over the step" in text
    text = page_of_plan(tmp_path, explained=made_explanation(beside=True))
    assert text.count('class="chart" role="img" aria-label="Bytes in use') == 2
    text = page_of_plan(tmp_path, run=folder, explained=made_explanation())
    assert "alert" not in text, "what is given counts"


def test_what_moves_to_host_memory_and_back_stands_in_a_table(tmp_path):
    text = page_of_plan(tmp_path, explained=made_explanation())
    (section,) = re.findall(r"To host memory and back.*?</section>", text)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", r) for r in section.split("<tr>")[2:]]
    assert [[re.sub("<wbr>", "", cell) for cell in row] for row in rows] == [
        ["offloaded: up", "to the device", "by DMA, in loops", "30.0 MiB", "100%"],
        ["params[&#x27;layers&#x27;]", "to the device", "by kernels, once", "10.0 MiB", "0%"],
        ["together", "to the device", "–", "40.0 MiB", "75%"],
        ["offloaded: up", "to host memory", "by DMA, in loops", "30.0 MiB", "50%"],
        ["together", "to host memory", "–", "30.0 MiB", "50%"],
    ]
    text = page_of_plan(tmp_path, explained=made_explanation(transfers=()))
    assert "To host memory and back" not in text


def test_a_step_of_no_bytes(tmp_path):
    live = made_live()
    nothing = tuple(dataclasses.replace(p, bytes=(0,) * live.points) for p in live.parts)
    page_of_plan(tmp_path, explained=made_explanation(live=Live(3, 0, nothing, live.phases)))
