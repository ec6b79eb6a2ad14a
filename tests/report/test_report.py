"""The page about plans and runs: well-formed, in one file, honest about what it leaves out."""

import re

import pytest

from jaxmem._core.actions import KEEP
from jaxmem._result.plan.rows import Measured
from jaxmem.cli import main
from tests.shared.report_pages import HOSTILE, MIB, made, page_of, page_of_plan, row, write_run


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
