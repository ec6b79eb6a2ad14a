"""README.md and docs/results.md quote of plans and placed states what the committed results say."""

import re
import statistics

import pytest

from benchmarks.shared.stale import written_by
from benchmarks.stacks import NOTHING, SCRIPTS, STORED, lines_of
from tests.shared.quoted import (
    ASKED,
    MODELS,
    PAGE,
    QUARTILES,
    README,
    ROOT,
    answer,
    numbers,
    quotes,
    result,
    tables,
)


@pytest.mark.parametrize(
    ("cell", "values", "agrees"),
    [
        ("0.89 (0.86 to 0.95)", (0.894, 0.864, 0.952), True),
        ("0.89", (0.896,), False),
        ("3.3 × 10⁻⁶, relative", (3.33e-6,), True),
        ("3.3 × 10⁻⁶, relative", (3.43e-6,), False),
        ("float32, −0.077", (-0.0771,), True),
        ("11 of 11", (11, 10), False),
    ],
)
def test_quotes_are_told_from_what_only_resembles_them(cell, values, agrees):
    assert quotes(cell, *values) is agrees


def test_the_page_names_the_commit_that_wrote_each_result():
    """Where a result records its commit, or git knows it."""
    text = "".join((ROOT / p).read_text("utf-8") for p in ("docs/results.md", "docs/kernels.md"))
    named = re.findall(r"`benchmarks/results/(\w+)\.json`(?:\s\(commit\s`(\w+)`\))?", text)
    assert len(named) > 40
    for name, commit in named:
        wrote = written_by(ROOT, ROOT / "benchmarks" / "results" / f"{name}.json")
        assert commit, name
        assert wrote is None or wrote.startswith(commit), name


@pytest.mark.parametrize("task", README)
def test_the_readme_quotes_the_summary(task):
    """Each number of a row is one of the summary's for the same script, in the same order."""
    _, ours, script = README[task]
    (question,) = (q for q, (_, name) in ASKED.items() if name == script)
    left = iter(numbers(f"{question} {ASKED[question][0]}"))
    named = {"4090"}  # of a device
    said = [n for n in numbers(ours) if n not in named]
    assert [n for n in said if n not in left] == [], (said, ASKED[question])


def test_plans_and_their_budgets():
    rows, cases = PAGE["Plans and their budgets"], list(result("budgets")["summary"].values())
    for cell, case in zip(rows["plans within their budget, as compiled"], cases, strict=True):
        assert quotes(cell, case["within the budget"], case["budgets"])
    for row, key, factor in (
        ("compiles of one search, median", "median compiles", 1),
        ("compiles of one search, most", "most compiles", 1),
        ("predicted bytes against compiled ones, median error", "median prediction error", 100),
        ("the same, largest error", "largest prediction error", 100),
        ("share of the budget that is used, median", "median share of budget", 100),
    ):
        assert quotes(" ".join(rows[row]), *(factor * case[key] for case in cases)), row
    totals = (sum(c[key] for c in cases) for key in ("within the budget", "budgets"))
    assert quotes(answer("stay within its budget"), *totals)


def test_plans_for_tpus_against_policies_by_hand():
    page, summary = PAGE["TPUs that are not there"], result("tpu_baselines")["summary"]
    assert [name.replace(", ", " ") for name in page] == [*summary]
    for cells, case in zip(page.values(), summary.values(), strict=True):
        for cell, outcome in zip(cells, ("win", "draw", "loss", "none found"), strict=True):
            assert quotes(cell, case["counts"][outcome])
    rows = [row for case in summary.values() for row in case["rows"].values()]
    ratios = [row["time against the baseline's"] for row in rows if row["outcome"] != "none found"]
    assert quotes(answer("roofline of a TPU"), min(ratios), max(ratios))


def test_plans_for_tpus_over_the_range_of_budgets():
    page, summary = PAGE["Budgets of TPUs that are not there"], result("tpu_budgets")["summary"]
    assert [name.replace(", ", " ") for name in page] == [*summary]
    for cells, case in zip(page.values(), summary.values(), strict=True):
        keys = ("found", "within", "most compiles", "median share of budget")
        for cell, key in zip(cells, keys, strict=True):
            value = case[key] * (100 if "share" in key else 1)
            assert quotes(cell, value, *([case["budgets"]] if " of " in cell else [])), (key, cell)
    totals = [sum(case[key] for case in summary.values()) for key in ("found", "budgets")]
    assert quotes(answer("budget for a TPU"), *totals)
    assert all(case["within"] == case["found"] for case in summary.values())


def test_models_as_they_are():
    summary, auto = result("foreign")["summary"], result("auto_tags")["summary"]
    page = PAGE["Models as they are"] | PAGE["Tags by hand and by auto"]
    values = [
        [summary["found"], summary["budgets"]],
        [summary["found of these"], summary["not below 0.97 of full recomputation"]],
        [summary["within"], summary["found"]],
        [summary["largest difference of the loss"]],
        [summary["largest difference of a gradient, lossless"]],
        [summary["use 85 % of it at least"], summary["plans for h200 at 0.9"]],
        [auto["found under auto"], auto["found with tags"], auto["budgets"]],
        [auto["largest ratio"], auto["geometric mean"]],
        [auto["seconds of the first plan, auto over tags"]],
        [auto["median solve under auto"]],
    ]
    for (question, cells), expected in zip(page.items(), values, strict=True):
        assert quotes(cells[0], *expected), question
    assert summary["within"] == summary["found"]
    assert quotes(answer("as they are"), summary["found"], summary["budgets"], summary["models"])
    assert quotes(
        answer("tags by hand"), auto["geometric mean"], auto["budgets"], auto["largest ratio"]
    )


def test_exactness():
    answers = [cells[0] for cells in PAGE["Exactness"].values()]
    summary, profile = result("exactness")["summary"], result("profile_exact")["summary"]
    equal = [int(n) for n in numbers(summary["float32 losses bit-equal"])]
    expected = [
        equal,
        [summary["bfloat16 loss, farthest (target 1e-3)"]],
        [summary["float64 gradient, farthest (target 1e-12)"]],
        [profile["equal in bytes and products, as traced"], profile["plans"]],
        [profile["equal in recomputed products, as compiled"], profile["plans compiled"]],
    ]
    for cell, values in zip(answers, expected, strict=True):
        assert quotes(cell, *values)
    assert quotes(answer("the same training"), *equal)


def test_quality():
    rows, summary = PAGE["Quality under codecs"], result("quality")["summary"]
    trained = {
        "plan": "under the plan for 100 MB",
        "own_codecs": "with every tag compressed by the codec of its kind",
        "naive": "with every tag compressed by naive per-token INT4",
    }
    for name, row in trained.items():
        found = summary["validation_loss"][name]
        shares = found["relative_difference"], min(found["by_seed"]), max(found["by_seed"])
        percent = [100 * share for share in shares]
        assert quotes(rows[row][0], *percent), name
        assert name != "plan" or quotes(answer("codec cost in quality"), *percent)
    for kind, found in summary["gradient_one_less_cosine_by_kind"].items():
        assert quotes(" ".join(rows[kind]), found["own"], found["naive"]), kind


def test_policies_on_a_cpu():
    names = {
        "keep_tags": "every tag kept",
        "nothing_saveable": "nothing_saveable (full recomputation)",
        "naive_int4_everywhere": "naive INT4 everywhere",
    }
    found = result("baselines_cpu")
    rows = found.get("rows") or [*found["results"].values()]  # the older layout, or today's
    assert len(rows) == len(PAGE["On a CPU"]) == 10
    medians: dict[str, list[float]] = {"plan": [], "lossless_plan": []}
    for row in rows:
        cells = PAGE["On a CPU"][names.get(row["baseline"], row["baseline"])]
        assert quotes(cells[0], row["bytes"] / 1e6)
        for cell, way in zip(cells[1:], medians, strict=True):
            assert quotes(cell, *(row["ratios"][way][key] for key in QUARTILES)), row["baseline"]
            medians[way].append(row["ratios"][way]["median"])
    ends = (end(found) for found in medians.values() for end in (min, max))
    assert quotes(answer("ten policies that"), *ends)


def test_steps_that_the_clock_chose():
    page, summary = PAGE["Chosen by the clock"], result("measured")["summary"]
    ways = [summary["all actions"], summary["lossless"]]
    room = [list(way["to everything kept"].values()) for way in ways]
    expected = [
        [way["geometric mean"] for way in ways],
        [way["least"] for way in ways],
        [way["points"] for way in ways],
        [way["the plan is the policy"] for way in ways],
        [len(way["slower beyond the quartiles"]) for way in ways],
        list(map(min, room)),
        list(map(max, room)),
    ]
    for (row, cells), values in zip(page.items(), expected, strict=True):
        assert quotes(" ".join(cells), *values), row
    assert quotes(answer("by the clock"), min(map(min, room)), max(map(max, room)))


def test_policies_for_an_h200():
    names = {"keep_everything": "everything kept", "keep_tags": "every tag kept"}
    found: dict[str, list[float]] = {}
    for summary in result("baselines_h200")["summary"].values():
        for row in summary["rows"]:
            base, plan = row["xla_seconds"]
            if base is not None:
                found.setdefault(names.get(row["against"], row["against"]), []).append(plan / base)
    assert found.keys() == PAGE["For an H200"].keys()
    for policy, ratios in found.items():
        assert quotes(" ".join(PAGE["For an H200"][policy]), *ratios), policy
    others = [r for policy, ratios in found.items() if "kept" not in policy for r in ratios]
    assert quotes(
        answer("XLA's estimate, H200"), min(others), max(others), max(found["every tag kept"])
    )
    results = result("baselines_h200")["results"]
    for row, cells in PAGE["Below all of them"].items():
        model = row.split(",")[0]
        policies = [v["bytes"] for k, v in results.items() if k.startswith(f"{model} baseline")]
        plan = results[f"{model} plan 8 % below the least"]["bytes"]
        assert quotes(" ".join(cells), min(policies) / 1e9, plan / 1e9), row


OF_ALL = "of full recomputation, at most"


def spans_of_long_context() -> list[float]:
    rows = result("long_context")["results"]
    assert all(rows[name]["half"] is None for name in ("device", "codecs"))
    sizes = lambda row: (row["without spans"] / 2**30, row["in spans"] / 2**30, row["ratio"])
    return [n for name in ("device", "codecs") for n in sizes(rows[name])]


def test_the_planner_itself():
    page, solver = PAGE["The planner itself"], result("solver")["summary"]
    equal = solver["random solves equal to brute force or infeasible in both"]
    slowest = solver["longest solve on a real profile"]
    seconds = result("plan_seconds")
    taken = [case["seconds"] for case in seconds["summary"].values()]
    compiles = [row["compiles"] for row in seconds["results"].values()]
    spread = result("time_spread")["summary"]
    quiet, busy = spread["before_others"], spread["beside_others"]
    told = result("walk")["summary"]
    ways = ("a loop over layers", "a Python loop")
    of = lambda what: [100 * told[f"{t}, {way}"][what] for way in ways for t in ("h200", "local")]
    walks, median, worst = len(result("walk")["results"]), of("median error"), of("worst")
    times, luck = result("step_times")["summary"], result("least")["summary"]
    numbers = ("plans", "median error", "90 % are within", "Spearman")
    sizes, middle, most, ranks = (
        [times[m][n] for m in ("gpt_nano", "BERT", "ViT")] for n in numbers
    )
    cases = ("gpt_nano local", "gpt_117m h200")
    first = result("jit_first_steps")["summary"]["gpt_nano"]
    expected = [
        equal,
        [solver["greedy better than the solver"], solver["solves on real profiles"]],
        [slowest],
        *([s, n] for s, n in zip(taken, compiles)),
        [*sizes, *(100 * t for t in middle), *(100 * t for t in most), *ranks],
        [100 * result("time_choices")["summary"][model]["median error"] for model in MODELS],
        [walks, 17, *median, *worst],
        [*(100 * luck[c]["spread"] for c in cases), *(luck[c][OF_ALL] for c in cases)],
        [96, 4, 32768, *spans_of_long_context()],
        [
            max(quiet["spread_of_sessions"]),
            min(busy["spread_of_sessions"]),
            min(busy["error_of_sessions"]),
            max(busy["error_of_sessions"]),
        ],
        [result("jit_calls")["summary"]["most microseconds more"]],
        [first[f"first step, {STORED}"], first[f"first step, {NOTHING}"]],
    ]
    for (question, cells), values in zip(page.items(), expected, strict=True):
        assert quotes(cells[0], *values), question
    assert quotes(answer("solver exact"), *equal, slowest)
    assert quotes(answer("planning take"), *taken)
    assert all(case["reached"] for case in seconds["summary"].values())
    assert quotes(answer("Are predicted times"), times["all"]["plans"], *(100 * t for t in middle))
    assert quotes(answer("least bytes that a search"), luck["gpt_117m h200"][OF_ALL])


def test_what_each_phase_of_the_search_gains():
    page, summary = PAGE["What each phase of the search gains"], result("ablations")["summary"]
    phases = "local search", "whole steps", "groups"
    for cells, found in zip(page.values(), summary.values(), strict=True):
        for cell, phase in zip(cells, phases, strict=True):
            if phase not in found:
                assert "does not run" in cell
                continue
            lost, ratios = found[phase]["budgets refused without it"], found[phase]["time ratios"]
            refused = (len(lost), len(lost) + len(ratios)) if lost else ()
            assert quotes(cell, *refused, max(ratios))
    gains = {p for found in summary.values() for p in phases if found.get(p, {}).get("worth it")}
    assert gains == {*phases}, "the page says that each phase gains"


def test_what_the_correction_of_prices_gains():
    page = PAGE["What the correction of prices by measured steps gains"]
    found = result("corrections")
    rows, summary = found["results"], found["summary"]
    assert len(rows) == len(page) == summary["budgets"]
    means = []
    for number, when in enumerate(("", "later ")):
        gains = {
            case: 1.0 if row[f"{when}same plan"] else row[f"{when}ratio"]["median"]
            for case, row in rows.items()
        }
        for case, row in rows.items():
            cell = page[case][number]
            if row[f"{when}same plan"]:
                assert cell == "equal plans"
            else:
                assert quotes(cell, *(row[f"{when}ratio"][key] for key in QUARTILES)), case
        means.append(
            (
                statistics.geometric_mean(gains.values()),
                sum(gain >= 1.01 for gain in gains.values()),
                min(gains.values()),
            )
        )
    (now, many, worst), (later, more, _) = means
    assert (round(now, 3), round(later, 3), many, more) == (1.008, 1.029, 6, 6)
    assert round(worst, 2) == 0.94
    assert {k: round(v, 1) for k, v in summary["steps run"].items()} == {
        "with": 5.5,
        "without": 5.2,
    }
    chosen = [row["chosen"] for row in result("measured")["results"].values()]
    assert (len(chosen), sum("corrected" in name for name in chosen)) == (30, 0)


def test_the_layer_stack():
    plans = {
        "everything kept": ("keep everything", "everything kept"),
        "every tag kept": ("keep", "keep"),
        "every tag recomputed": ("recompute", "recompute"),
        "every tag compressed": ("compress", "compress"),
        "every tag offloaded": ("offload", None),
        "solved for": ("solved 0.2", "solved"),
    }
    ratios = result("stack_bytes")["summary"]["ratios"]
    times = result("stack_time")
    times = times.get("stack to scan") or times["results"]  # the older layout, or today's
    assert plans.keys() == PAGE["Bytes"].keys()
    for row, (compiled, timed) in plans.items():
        keys = [f"{m} {t} {compiled}" for t in ("h200", "local") for m in ("gpt_117m", "gpt_345m")]
        for cell, key in zip(PAGE["Bytes"][row], keys, strict=True):
            assert quotes(cell, ratios[key]) if key in ratios else not cell, key
        if timed is not None:
            medians = (times[timed][key]["median"] for key in ("clock", "cores"))
            assert quotes(" ".join(PAGE["Time"][row]), *medians), row


def test_the_largest_model_of_one_device_and_its_host():
    page = PAGE["The largest model of one device and its host"]
    results, summary = (result("largest")[part] for part in ("results", "summary"))
    names = [name for name in results if name.endswith(", joint")]
    assert list(page) == [name.removesuffix(", joint") for name in names]
    rules = ("joint", "states alone", "activations alone", "nothing moved")
    for row, cells in page.items():
        found = {rule: results[f"{row}, {rule}"] for rule in rules}
        for cell, rule in zip(cells, rules):
            assert quotes(cell, found[rule]["parameters"] / 1e9), row
        sizes = (found["joint"][which] / 1e9 for which in ("predicted", "compiled"))
        assert quotes(cells[4], *sizes), row
        assert quotes(cells[5], 100 * summary["share"][row]), row
        assert quotes(cells[6], 100 * summary["share of all memory"][row]), row
    assert len(page) == 9
    assert summary["within"]
    assert min(summary["share"].values()) >= 0.95, "what was asked for"
    joint, alone = (results[f"rtx4090, 256 GB, {rule}"] for rule in ("joint", "nothing moved"))
    sizes = (joint[size] / 1e9 for size in ("compiled", "host compiled"))
    said = answer("larger than the device").replace("4090", "")
    assert quotes(said, joint["parameters"] / 1e9, 256, *sizes, alone["parameters"] / 1e9)


def test_plans_that_place_states():
    page, placed = PAGE["Plans that place states"], result("placed")
    by: dict[str, list] = {}
    for key, row in placed["results"].items():
        by.setdefault(key.rpartition(", ")[0], []).append(row)
    assert page.keys() == by.keys()
    for row, cells in page.items():
        size = lambda name, rows=by[row]: [100 * abs(r[name]) for r in rows]
        first, errors = size("first error"), size("error")
        most = max(r["compiles"] for r in by[row])
        middle = statistics.median(first), statistics.median(errors), max(errors)
        assert quotes(" ".join(cells), len(by[row]), most, *middle), row
    assert placed["summary"]["plans"] == placed["summary"]["host bytes exact"] == 30


def test_what_deciding_together_is_worth():
    page, summary = PAGE["What deciding together is worth"], result("placed_rules")["summary"]
    rules = "states first", "actions first", "states alone", "all streamed", "resident", "ProTrain"
    for cells, rule in zip(page.values(), rules, strict=True):
        found = summary[rule]
        told = found["found"], summary["budgets"], found["times as long"], found["most"]
        assert quotes(" ".join(cells), *told), rule
        assert found["least"] >= 1
    assert summary["rises with the budget"] == summary["falls with less host memory"] == 0


def test_time_of_placed_plans_on_a_cpu():
    page, results = PAGE["Time on a CPU"], result("placed_times")["results"]
    assert page.keys() == results.keys()
    for row, cells in page.items():
        errors = [100 * abs(r["error"]) for share, r in results[row].items() if share != "1.0"]
        whole = [r["absolute"] for r in results[row].values()]
        assert quotes(" ".join(cells), *errors, min(whole), max(whole)), row


def test_codecs_on_tpus():
    page, results = tables("docs/kernels.md")["A step on a TPU"], result("tpu_codecs")["results"]
    assert page.keys() == {"v5e", "v5p", "v6e"}
    ways = "keep", "grouped_symmetric, kernels", "grouped_symmetric, references"
    for tpu, cells in page.items():
        steps = results[f"{tpu} steps"]
        for cell, way in zip(cells, ways, strict=True):
            assert quotes(cell, steps[way]["MiB"], steps[way]["estimated_ms"]), (tpu, way)
    text, summary = (ROOT / "docs/kernels.md").read_text("utf-8"), result("tpu_codecs")["summary"]
    said = re.search(r"the median codec\s(.*?)as much as the least", text, re.S)
    ways = [summary[f"v5e {way}"] for way in ("kernels", "references")]
    assert quotes(
        said[1], *(w[f"median {way} passes"] for w in ways for way in ("encode", "decode"))
    )


def test_what_the_changed_lines_of_each_stack_cost():
    page = tables("docs/libraries.md")["What the changed lines cost"]
    measured = result("stacks_jit")
    assert page.keys() == measured["summary"].keys() == SCRIPTS.keys()
    columns = (
        "lines", "microseconds of a call", "microseconds more",
        f"first step, {NOTHING}", f"first step, {STORED}",
    )  # fmt: skip
    for name, cells in page.items():
        assert measured["results"][f"{name}, lines"] == lines_of(name), name
        for cell, column in zip(cells, columns, strict=True):
            value = measured["summary"][name].get(column)
            assert cell == "–" if value is None else quotes(cell, value), (name, column)


def test_choices_beside_protrains():
    page, rows = PAGE["Beside ProTrain's choices"], result("protrain_table")["results"]
    for cells, row in zip(page.values(), rows.values(), strict=True):
        theirs, *ours = cells
        assert theirs == row["protrain"]
        sizes = row["compiled"] / 1e9, row["host"] / 1e9
        told = row["persist"], row["layers"], row["offloaded"], *sizes
        assert quotes(" ".join(ours), *told), row
    offloaded = {name: row["offloaded"] + row["streamed"] for name, row in rows.items()}
    assert offloaded["A, RTX 3090"] < offloaded["B"]  # a larger batch
    assert offloaded["B"] > offloaded["C"] == 0  # other GPUs
    assert offloaded["D"] > offloaded["E"] == 0
    assert offloaded["A, RTX 3090"] < offloaded["D"]  # a larger model
    once = {name for name, row in rows.items() if row["divided"] == "states"}
    assert once == {name for name, row in rows.items() if not row["streamed"]}


def test_the_page_has_the_plans_of_openpi():
    page = (ROOT / "docs" / "libraries.md").read_text("utf-8")
    said = " ".join(page[page.index("## openpi") :].partition("## AXLearn")[0].split())
    rows, capacity = result("stacks_openpi")["results"], {"lora": 24e9, "full": 85e9}
    for row in rows.values():
        gb = lambda what, row=row: f"{row[what] / 1e9:.3g} GB"
        host = f"with {gb('bytes in host memory')} of tensors in host memory"
        assert f"the plan compiles to {gb('bytes of the plan')}" in said
        assert host in said
        assert f"the step takes {gb('bytes as openpi writes it')}" in said
        slower = row["seconds as openpi writes it"] / row["seconds of the plan"]
        assert f"{slower:.2f} times the plan's time" in said
        assert row["bytes of the plan"] <= row["budget"] < capacity[row["way"]]
    kept = rows["lora, rtx4090"]["bytes of everything kept"]
    assert f"everything kept takes {kept / 1e9:.3g} GB" in said


def test_each_action_alone():
    found = result("actions")
    page = PAGE["What each action gains"]
    rows = {
        f"{name}, {share}": row for name, s in found["results"].items() for share, row in s.items()
    }
    assert [*page] == [*rows]
    for cells, row in zip(page.values(), rows.values(), strict=True):
        for cell, key in zip(cells, ("recompute", "offload", "compress"), strict=True):
            assert quotes(cell, row[key])
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert f"{found['summary']['offload']:.2f} times as long" in text
    assert f"up to {found['summary']['recompute']:.2f} times" in text


def test_what_each_tensor_costs():
    page, found = PAGE["What each tensor costs"], result("tensors")["results"]["gpt_345m"]
    assert [*page] == [*found]
    for cells, row in zip(page.values(), found.values(), strict=True):
        times = row["milliseconds"]
        values = row["bytes"] / 1e6, row["compressed"] / 1e6, times["recompute"], times["compress"]
        assert all(quotes(cell, value) for cell, value in zip(cells, values))
        assert cells[-1] == row["best"]
