"""The page about plans and runs: well-formed, in one file, honest about what it leaves out. Grids
of tensors, counts of outliers, places of states, and memory over the schedule are the data; hostile
text is text. Of broken or odd data the page is made whole, or an error names the file and field.
"""

import dataclasses
import json
import re

import pytest

from jaxmem import plans
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, UNTAGGED, Action
from jaxmem._core.bytes import show_bytes
from jaxmem._model.states.places import HOST, Places
from jaxmem._result.action_styles import LOOKS
from jaxmem._result.memory.live import Live
from jaxmem._result.plan.rows import Bytes, Measured, Point
from jaxmem._train.rectifier.counts import Outliers
from jaxmem._train.report.memory import live_figure
from jaxmem._train.report.outliers import decided, outlier_maps
from jaxmem._train.report.report import report_runs as report
from jaxmem._train.report.tensors import curve_grid, runs_grid
from jaxmem._train.report.timeline import places_figure
from jaxmem._train.runs.run import Run
from jaxmem.cli import main
from jaxmem.errors import PlanFileError
from tests.shared.explanations import made_explanation, made_live
from tests.shared.report_pages import HOSTILE, MIB, made, page_of, page_of_plan, row, write_run
from tests.shared.timelines import timeline


def test_a_run_with_everything(tmp_path):
    run = write_run(
        tmp_path / "run", made(), [5.5, 4.0, 3.0], config="nano", final_loss=3.0, val_loss=3.125,
        tokens_per_second=31234.5, steps=3, peak_bytes=93 * MIB,
        command="python -m experiments.train nano",
    )  # fmt: skip
    text = page_of(tmp_path, run)
    for said in (
        "nano", "70.0 MiB", "70.0 % of the budget", "10.0&nbsp;%", "220.0 MiB", "32.0 MiB",
        "20.00 ms", "15.00 ms", "3.0000", "3.1250", "31,234", "93.0 MiB", "offload is dear here",
        "python -m experiments.train nano", "jax 0.10.2", "keep: +1 ms a step", "8 × 256",
    ):  # fmt: skip
        assert said in text


def test_a_plan_file_and_the_default_place(tmp_path, capsys):
    made().save(tmp_path / "mine.json")
    assert main(["report", str(tmp_path / "mine.json")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "<h1>mine</h1>" in (tmp_path / "report.html").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"mine.json", "report.html"}


def test_several_runs_share_a_plot_and_have_a_section_each(tmp_path):
    kept = {"compiled_bytes": 220 * MIB, "policy": "keep_everything"}
    runs = [
        write_run(tmp_path / "a" / "run", made(), [5.0, 4.0], val_loss=4.5),
        write_run(tmp_path / "b" / "run", None, [5.0, 3.0], **kept),
        write_run(tmp_path / "c", made(target="h200")),
    ]
    text = page_of(tmp_path, *runs)
    assert text.count("Training loss against step") == 1
    assert re.findall(r'<h2 class="run">(.*?)</h2>', text) == [runs[0], runs[1], "c"]
    assert text.count("<h3>Plan</h3>") == 2
    assert "without a plan: keep everything" in text
    assert {"s0", "s1"} <= set(re.findall(r'class="line (s\d)"', text[: text.index("<h2")]))


def test_names_from_files_are_text(tmp_path):
    whole = HOSTILE.removesuffix("\ud800")  # half a character is no plan's
    hostile = row(KEEP, whole, whole, kind=whole, dtype=whole, why=whole)
    texts = dict.fromkeys(("target", "time_source", "fingerprint", "jax_version"), whole)
    plan = made(hostile, notes=(whole,), **texts)
    text = dict.fromkeys(("config", "command", "jax_version"), HOSTILE)
    text |= {"settings": {HOSTILE: HOSTILE}}
    run = write_run(tmp_path / "run", plan, [1.0, None] * 500, **text)
    page = page_of(tmp_path, run, write_run(tmp_path / "other", None, [1.0], target=HOSTILE))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("gap", [None, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("count", [2, 2_000])
def test_rows_without_a_loss_are_gaps(gap, count, tmp_path):
    text = page_of(tmp_path, write_run(tmp_path / "run", None, [3.0, gap] * count))
    assert f"rows without a finite loss are left out: {count:,} of {2 * count:,}" in text
    assert len(re.findall(r'class="line s0" d="M\d+', text)) == 1


def test_a_plan_s_page_tells_of_a_run(tmp_path):
    write_run(tmp_path / "run", None, [5.0, 4.0], config="nano", val_loss=4.25)
    text = page_of_plan(tmp_path, run=tmp_path / "run")
    assert "<h1>nano</h1>" in text
    assert "4.2500" in text
    assert "Training loss against step" in text


def tiles(text) -> dict[str, tuple[str, str]]:
    found = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd><dd class=\"beside\">([^<]*)</dd>", text)
    return {name: (size, beside) for name, size, beside in found}


def test_only_what_ran_is_called_measured(tmp_path):
    """Of every tile, what is predicted says so, and nothing else does."""
    runs = {
        "predicted": made(baseline_source="pieces"),
        "run": made(baseline_source="measured"),
        "chosen": made(measured=(Measured("plan", MIB, 0.017, 0.018, 0.019, 8, True),)),
    }
    found = {name: tiles(page_of_plan(tmp_path, plan)) for name, plan in runs.items()}
    for one in found.values():
        assert one["Step, predicted"][0] == "20.00 ms"
        assert "measured" not in one["Step, predicted"][1]
    kept = {name: one["Step, everything kept"] for name, one in found.items()}
    assert kept["predicted"] == ("15.00 ms", "predicted: the sum of its pieces")
    assert kept["run"] == ("15.00 ms", "measured: it ran for a second")
    page = page_of(tmp_path, *(write_run(tmp_path / name, plan) for name, plan in runs.items()))
    assert re.findall(r"15\.00 ms, (\w+)", page) == ["predicted", "measured", "predicted"]
    assert "Step, measured" not in found["run"]
    assert found["chosen"]["Step, measured"][0] == "18.00 ms"


def paced(folder, plan, paces):
    rows = [{"step": i, "loss": 2.0, "step_seconds": s} for i, s in enumerate(paces, 2)]
    return write_run(folder, plan, rows=[{"step": 1, "loss": 2.0}, *rows])


def test_steps_that_a_run_took_are_measured_and_beside_them_is_what_was_predicted(tmp_path):
    paces = [0.030, 0.031, 0.032, 0.033, 0.034, 5.0]
    text = page_of(tmp_path, paced(tmp_path / "run", made(), paces))
    size, beside = tiles(text)["Step, measured"]
    assert size == "32.00 ms"
    assert beside == "while training; half of 6 steps took 31.00 ms to 34.00 ms"
    assert "Measured time of a step" in text
    assert "<span>predicted: 20.00 ms</span>" in text
    assert "are cut off: 1 of 6, the longest of 5,000.0 ms." in text
    other = page_of(tmp_path, paced(tmp_path / "gpu", made(target="h200"), paces))
    assert "Measured time of a step" in other
    assert "<span>predicted: " not in other, "the run's device is not the plan's"
    untimed = page_of(tmp_path, write_run(tmp_path / "x", made(), [2]))
    assert "Measured time of a step" not in untimed


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


def seen(step, places, channels=10, tag="up", block="block"):
    counts = tuple(len(of) for of in places)
    return Outliers(step, block, tag, channels, counts, (4.0,) * len(places), places)


def cells(figure):
    """(x, y, opacity) of the cells, in percent."""
    number = r'="([\d.]+)%?"'
    cell = f"x{number} width{number} y{number} height{number} opacity{number}"
    found = [(x, y, opacity) for x, _, y, _, opacity in re.findall(cell, figure)]
    return [tuple(map(float, cell)) for cell in found]


CODEC = "outlier_separated(group=64,scale=bfloat16,capacity=3)"


def test_cells_are_channels_by_steps():
    figure = outlier_maps(Run("r", None, outliers=(seen(1, ((2,), ())), seen(2, ((2, 9), (2,))))))
    assert cells(figure) == [(20.0, 0.0, 0.62), (20.0, 50.0, 1.0), (90.0, 50.0, 0.62)]
    assert "at step 2 at most 2 outliers in one of 2 tensors, 15.00 % of all channels" in figure
    assert "steps 1 to 2" in figure
    assert outlier_maps(Run("r", None)) == ""


def test_decisions_are_listed(tmp_path):
    rows = [
        {"step": 1, "taken": False, "why": HOSTILE, "predicted_seconds": 0.01},
        {
            "step": 1024, "taken": True, "event": "swap", "why": "faster", "step_seconds": 0.5,
            "changed": {"block/up": f"keep -> compress {CODEC}"},
        },
    ]  # fmt: skip
    table = decided(Run("r", None, decisions=tuple(rows)))
    assert HOSTILE not in table
    for text in ("declined", "swap", "1,024", "500.0 ms", "10.00 ms", "(capacity=3)"):
        assert text in table, text
    counts = [seen(4, ((3,),)).to_json()]
    folder = write_run(tmp_path / "r", losses=[1.0], decisions=rows, outliers=counts)
    page = page_of(tmp_path, folder)
    assert "<h3>Outliers</h3>" in page
    assert "<h3>Decisions</h3>" in page


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


COUNTED = Outliers(1, "block", "up", 10, (1,), (4.0,), ((2,),)).to_json() | {"counts": ["x"]}


@pytest.mark.parametrize(
    "change",
    [
        {"points": ()},
        {"points": (Point(0, 0.0),), "compiled_bytes": 0, "baseline_bytes": 0},
        {"points": (Point(5, 0.1),), "budget_bytes": 2**63 - 1},
        {"budget_bytes": 1, "predicted_seconds": 0.0, "baseline_seconds": 0.0},
        {"parts": Bytes(0, 0, 0), "baseline_parts": Bytes(0, 0, 0)},
        {"parts": Bytes(10, 20, -5)},
        {"rows": ()},
        {"rows": (row(KEEP, kind=None, shape=()),)},
        {"notes": ()},
    ],
    ids=str,
)
def test_what_is_missing_or_odd_does_not_break_the_page(change, tmp_path):
    page_of(tmp_path, write_run(tmp_path / "run", dataclasses.replace(made(), **change)))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "lo', "line 2: .*expected JSON"),
        ("metrics.jsonl", '{"step": 1, "step_seconds": -1}', "field `step_seconds`: got -1"),
        ("metrics.jsonl", "3\n", "line 1: got 3, expected an object"),
        ("metrics.jsonl", '\n{"loss": 2}\n', "line 2, field `step`: got None"),
        ("metrics.jsonl", '{"step": NaN, "loss": 2}', "line 1, field `step`: got nan"),
        ("metrics.jsonl", '{"step": 1, "loss": "<b>"}', "field `loss`: got '<b>'"),
        ("metrics.jsonl", b"\xff\xfe", "cannot read .*metrics.jsonl"),
        ("summary.json", "{", "summary.json': .*expected JSON"),
        ("summary.json", "[]", "summary.json', .*got 'list', expected an object"),
        ("summary.json", '{"val_loss": "2"}', "field `val_loss`: got '2', expected a number"),
        ("summary.json", '{"command": 3}', "field `command`: got 3, expected a text"),
        ("explained.json", '{"total_bytes": "many"}', "field `total_bytes`: got 'many'"),
        ("decisions.jsonl", '{"step": "x", "taken": true, "why": ""}', "line 1, field `step`"),
        ("decisions.jsonl", "[]", "line 1: got"),
        ("outliers.jsonl", '{"step": 1, "block": 3}', "line 1, field `block`"),
        ("outliers.jsonl", "{", "line 1: Expecting"),
        ("outliers.jsonl", json.dumps(COUNTED), r"line 1, field `counts\[0\]`: got 'x'"),
        ("plan.json", "{}", "plan.json', field `schema`"),
        ("plan.json", "", "cannot read .*plan.json"),
    ],
)
def test_a_broken_file_is_named(name, content, told, tmp_path):
    run = write_run(tmp_path / "run", made(), [1.0], config="nano")
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "run" / name).write_bytes(data)
    with pytest.raises(PlanFileError, match=told):
        report([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_results_and_no_folder(tmp_path):
    message = r"holds none of plan\.json, metrics\.jsonl, summary\.json"
    with pytest.raises(PlanFileError, match=message):
        report([str(tmp_path)], tmp_path / "page.html")
    with pytest.raises(PlanFileError, match="cannot read .*nothing"):
        report([str(tmp_path / "nothing")], tmp_path / "page.html")


def test_the_page_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "page.html").write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        plans.report(made(), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "before"
