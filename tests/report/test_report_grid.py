"""Grids of tensors against plans: of the curve, and of several runs."""

import dataclasses
import re

from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, UNTAGGED, Action
from jaxmem._result.action_styles import LOOKS
from jaxmem._result.plan.rows import Point
from jaxmem._train.report.tensors import curve_grid, runs_grid
from jaxmem._train.runs.run import Run
from tests.shared.report_pages import MIB, made, page_of, page_of_plan, row, write_run

UP, GELU = row(KEEP, "up"), row(RECOMPUTE, "gelu")


def grid(html) -> tuple[list[str], dict[str, list[str]]]:
    """The heads of the columns, and the letters of the cells of each row."""
    table = html[html.index('class="plans"') :]
    table = table[: table.index("</table>")]
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', table)[1:]
    rows = {}
    for name, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', table):
        rows[name] = ["".join(re.findall(r"<b>(\w+)</b>", cell)) or "–"
                      for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells)]  # fmt: skip
    return heads, rows


def planned(*points, **other):
    return made(UP, GELU, points=points, **other)


def test_each_point_of_the_curve_has_its_plan():
    points = (
        Point(60 * MIB, 0.025, {"block": {"up": RECOMPUTE, "gelu": OFFLOAD}}),
        Point(80 * MIB, 0.018, {"block": {"up": KEEP, "gelu": RECOMPUTE}}),
        Point(220 * MIB, 0.015, {"block": {UNTAGGED: KEEP}}),
    )
    heads, rows = grid(curve_grid(planned(*points[::-1])))
    assert heads == ["60.0 MiB<br>25.00 ms", "80.0 MiB<br>18.00 ms", "220.0 MiB<br>15.00 ms"]
    assert rows == {"up": ["R", "K", "K"], "gelu": ["O", "R", "K"]}
    assert len(LOOKS) == len(Action)


def test_a_file_without_the_plans_of_its_curve_has_no_grid(tmp_path):
    assert curve_grid(planned(Point(1, 1.0), Point(2, 0.5))) == ""
    assert "The plan at each budget" not in page_of_plan(tmp_path)
    half = curve_grid(planned(Point(1, 1.0), Point(2, 0.5, {"block": {"up": KEEP}})))
    assert grid(half)[1] == {"up": ["–", "K"], "gelu": ["–", "–"]}


def test_runs_are_compared_by_tensor(tmp_path):
    groups = made(row(KEEP, "up", "block[0:2]"), row(OFFLOAD, "up", "block[2:4]"),
                  row(KEEP, "gelu", "block[0:2]"), row(KEEP, "gelu", "block[2:4]"))  # fmt: skip
    kept = dataclasses.replace(made(UP, GELU), actions={"block": {UNTAGGED: KEEP}})
    more = made(UP, GELU, row(RECOMPUTE, "new"))
    named = [Run(*run) for run in zip("abcde", (made(UP, GELU), groups, kept, more, None))]
    heads, rows = grid(runs_grid(named))
    assert [head.split("<")[0] for head in heads] == ["a", "b", "c", "d"]
    up, gelu, new = ["K", "KO", "K", "K"], ["R", "K", "K", "R"], ["–", "–", "K", "R"]
    assert rows == {"up": up, "gelu": gelu, "new": new}
    assert 'title="layers 3 to 4: offload"' in runs_grid(named)
    assert runs_grid(named[:1]) == runs_grid([named[0], named[-1]]) == ""
    folders = [write_run(tmp_path / name, plan) for name, plan in (("x", more), ("y", groups))]
    text = page_of(tmp_path, *folders)
    assert text.index("<h3>The plans</h3>") < text.index('<h2 class="run">')
