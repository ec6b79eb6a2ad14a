"""What docs/results.md quotes of AdamA, runs and checkpoints is in the committed results."""

import json
import re
import statistics

from tests.shared.quoted import PAGE, QUARTILES, ROOT, answer, numbers, quotes, result, tables


def test_bytes_of_the_gradient():
    page, summary = PAGE["Of the gradient"], result("adama_bytes")["summary"]
    size = {k: v / 1e9 for k, v in summary["gradient bytes"].items()}
    size["AdamA, each layer's gradient released"] = released = size.pop("AdamA, released")
    size["the same with the row ratio"] = row = size.pop("AdamA, released, row ratio")
    assert size.keys() == page.keys()
    beside = summary["and among the row ratio's"]
    assert beside == 8 * summary["rows"]
    assert quotes(page["the same with the row ratio"][0], row, beside / 1e9)
    for row, cells in page.items():
        assert quotes(cells[0], size[row]), row
    summed = summary["and among MultiSteps' arguments"] / 1e9
    assert quotes(page["optax.MultiSteps"][0], size["optax.MultiSteps"], summed)
    in_place = size["accumulation in place, layer by layer"]
    ends = released, size["AdamA, whole gradients"], in_place, size["accumulation in a scan"]
    assert quotes(answer("gradient of gpt_345m"), *ends)


def test_bytes_of_a_bert():
    page, found = PAGE["Of a BERT of 4.2 billion parameters"], result("adama_bert_4b")
    results, summary = found["results"], found["summary"]
    after = {1: results["AdamA, 1"], 8: results["AdamA, moments divided, 8"]}
    for row, before, devices, saved in (
        ("one H200", "accumulation, 1", 1, "1"),
        ("eight, moments divided", "accumulation, moments divided, 8", 8, "8"),
        (
            "eight, accumulation's gradients divided too",
            "accumulation, moments and gradients divided, 8",
            8,
            "8, against divided gradients",
        ),
    ):
        sizes = (r["bytes"] / 1e9 for r in (results[before], after[devices]))
        assert quotes(" ".join(page[row]), *sizes, 100 * summary[saved]["saved"]), row
    assert quotes(page["one H200"][3], 100 * summary["bound, 1"])
    assert quotes(page["eight, moments divided"][3], 100 * summary["bound, 8"])


def test_bytes_beside_other_optimizers():
    page, summary = PAGE["Beside other optimizers"], result("adama_table2")["summary"]
    assert len(page) == len(summary["bytes"])
    for key, size in summary["bytes"].items():
        row = re.sub(r"N=(\d)$", r"\1 microbatches", key).replace("1 microbatches", "1 microbatch")
        cells = page[row.replace(", with", " with")]
        assert quotes(cells[0], size / 1e9), key
    least = summary["AdamA, N=8, over the least of the others"]
    assert quotes(page["AdamA, 8 microbatches"][0], size / 1e9, least)


def test_the_largest_model():
    page, summary = PAGE["The largest model"], result("adama_largest")["summary"]
    ways = [
        f"{way}, {what}"
        for what in ("whole", "states divided")
        for way in ("accumulation", "AdamA")
    ]
    assert page.keys() == {"16 GB", "32 GB", "80 GB"}
    for cap, cells in page.items():
        sizes = [summary[f"{way}, {cap}"]["billion"] for way in ways]
        assert quotes(" ".join(cells), *sizes), cap
    whole, ours, divided, ours_divided = sizes
    assert quotes(answer("Largest BERT"), ours, whole, ours_divided, divided)


def test_losses_with_moments_in_8_bits():
    page, summary = dict(PAGE["Moments in 8 bits"]), dict(result("moments_losses")["summary"])
    within = summary.pop("within the spread")
    assert page.keys() == summary.keys()
    for name, cells in page.items():
        assert quotes(" ".join(cells), summary[name]["spread"], summary[name]["int8"]), name
    assert f"in {within} cases" in answer("moments in 8 bits")


def test_an_update_with_moments_in_8_bits():
    page = PAGE["Time of an update with moments in 8 bits"]
    found = result("moments_update")["results"]
    ratio = found["int8 to float32, this CPU"]
    seconds = [found[name]["seconds, h200, XLA's estimate"] for name in ("int8", "float32")]
    times = *(ratio[k]["median"] for k in ("clock", "cores")), seconds[0] / seconds[1]
    assert quotes(" ".join(page["8 bits"]), found["int8"]["state bytes a parameter"], *times)
    assert quotes(page["float32"][0], found["float32"]["state bytes a parameter"])


def test_the_largest_model_with_moments_in_8_bits():
    page, found = PAGE["The largest model with moments in 8 bits"], result("largest_moments")
    for moments, row in (("float", "largest with float32"), ("int8", "largest with 8 bits")):
        one, of_59 = found["results"][moments], found["results"][f"{moments}, 59 layers"]
        sizes = (one[key] / 1e9 for key in ("parameters", "compiled", "host compiled"))
        assert quotes(" ".join(page[row]), one["layers"], *sizes, of_59["seconds"]), row
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    text = text[text.index("in 8 bits has ") + len("in 8 bits") :]
    assert quotes(text[: text.index("Result:")], *found["summary"].values())


def test_full_fine_tuning_of_a_llama():
    page, found = PAGE["Full fine-tuning of a Llama of 7 billion parameters"], result("fine_tuning")
    assert page.keys() == found["results"].keys()
    for name, row in found["results"].items():
        sizes = (row[key] / 1e9 for key in ("compiled", "host compiled"))
        assert quotes(" ".join(page[name]), *sizes, row["seconds"]), name


def test_fine_tuning_on_cards():
    page, found = PAGE["Fine-tuning of a Llama on cards of 24 GB"], result("fine_tuning_cards")
    assert page.keys() == found["results"].keys()
    words = {"nothing": "the batch alone", "layers": "all states, by layer"}
    for name, row in found["results"].items():
        sizes = (row[key] / 1e9 for key in ("compiled", "everything kept"))
        assert quotes(" ".join(page[name][1:]), *sizes, row["seconds"]), name
        assert page[name][0] == words[row["divided"]], name
        budget = 6e9 if name.endswith("6 GB") else 24e9
        assert row["compiled"] <= budget, name
        assert not row["host compiled"], name


def test_predictions_beside_published_measurements():
    page, found = PAGE["Predictions beside published measurements"], result("published_steps")
    timed = {name: row for name, row in found["results"].items() if "ratio" in row}
    rows = {cell.partition(",")[0]: cells for cell, cells in page.items()}
    assert rows.keys() == timed.keys()
    for name, row in timed.items():
        values = row["measured"], row["seconds"], row["ratio"]
        assert quotes(" ".join(rows[name][2:]), *values), name
    published = json.loads((ROOT / "benchmarks/published.json").read_text(encoding="utf-8"))
    aside = {row["id"] for row in published if row["aside"]}
    assert aside == {c.partition(",")[0] for c in page if c.endswith(", aside")}
    errors = {name: abs(row["ratio"] - 1) for name, row in timed.items()}
    median, largest = statistics.median(errors.values()), max(errors[name] for name in aside)
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert f"largest error of the steps aside is {100 * largest:.1f} %" in text
    assert f"median error of all {len(timed)} steps is" in " ".join(text.split())
    assert quotes(answer("real hardware").partition("error is")[2], 100 * median, 100 * largest)
    assert quotes(answer("real hardware").partition("off by")[2], 100 * max(errors.values()))
    assert sum(error <= 0.08 for error in errors.values()) == 18


def test_bytes_and_collectives_on_meshes():
    page = PAGE["Bytes of a device, before a compile"]
    sizes, steps = result("slice_bytes"), result("slice_steps")["results"]
    assert page.keys() == sizes["results"].keys()
    for name, row in sizes["results"].items():
        values = row["estimated"] / 1e9, row["compiled"] / 1e9, row["ratio"], row["scalar ratio"]
        assert quotes(" ".join(page[name]), *values), name
    kinds = "all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all"
    none, page = {"runs": 0, "bytes": 0}, PAGE["Collectives and predicted times"]
    assert page.keys() == steps.keys()
    for name, row in steps.items():
        each = [row["collectives"].get(kind, none) for kind in kinds]
        moved = [n for one in each for n in (one["runs"], one["bytes"] / 1e9)]
        # A slice of TPUs has no thin network.
        thin = [row["thin"]] if "h200" in name else []
        times = row["seconds"], row["tokens a second"], row["alone"], *thin
        assert quotes(" ".join(page[name]), row["bytes"] / 1e9, *moved, *times), name
        order = row["alone"], row["seconds"], *thin
        assert sorted(order) == [*order], name
    seconds, page = result("slice_seconds"), PAGE["Seconds by the number of devices"]
    for devices, row in seconds["results"].items():
        assert quotes(" ".join(page[devices]), *row.values()), devices
    grown = (seconds["summary"][key] for key in ("estimate", "compile", "plan"))
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    (told,) = (part for part in text.split("to 256 devices, they grow by")[1:])
    assert quotes(told, *grown)
    each = [row["plan"] / row["compiles of the plan"] for row in seconds["results"].values()]
    assert quotes(told.partition("A plan takes")[2], min(each), max(each))
    found, was = sizes["summary"]["estimated"], sizes["summary"]["scalar"]
    said = 100 * found["median"], 100 * found["worst"]
    assert quotes(answer("on meshes").partition("error is")[2], *said)
    told = text.partition("as it was before. The median error is")[2]
    assert quotes(told, *said, 100 * was["median"], 100 * was["worst"])
    assert f"{sizes['summary']['within 2 %']} of 20 points are within 2 %" in text


def test_lora_of_a_model_of_7_billion_parameters():
    heading = "LoRA of a model of 7 billion parameters"
    page, found = PAGE[heading], result("lora_7b")["results"]
    names = {"frozen base in bfloat16": "bfloat16", "frozen base in 8 bits": "int8"}
    keys = []
    for row, cells in page.items():
        *how, budget = row.split(", ")
        keys.append(f"{names.get(how[-1], 'full')}, {budget}")
        one = found[keys[-1]]
        first = one["states"].split()[0]  # "14 of 32 layers", or "all 32 layers"
        layers = 32 if first == "all" else int(first)
        sizes = [one[key] / 1e9 for key in ("trained", "state bytes", "compiled", "host compiled")]
        assert quotes(" ".join(cells), *sizes[:2], layers, *sizes[2:], one["seconds"]), row
        assert one["compiled"] <= float(budget.removesuffix(" GB")) * 1e9
    assert keys == [*found]
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    text = " ".join(text.split())
    text = text[text.index("the step with the base in bfloat16 takes") :]
    half, eight = found["bfloat16, 24 GB"], found["int8, 8 GB"]
    assert quotes(text, half["everything kept"] / 1e9)
    sizes = half["compiled"] / 1e9, 24, eight["compiled"] / 1e9, 8, 8, eight["host compiled"] / 1e9
    assert quotes(answer("LoRA of 7 billion"), *sizes)


def test_time_of_adama():
    page, ratios = PAGE["AdamA: time"], result("adama_time")["results"]
    models = ("gpt_nano", "width 512")
    names = {"accumulation in a scan": "scan", "AdamA, whole gradients": "adama"}
    names["AdamA, released"] = "released"
    names["released, row ratio"] = "released, row ratio"
    for row, cells in page.items():
        of = [ratios[f"{model}, {names.get(row, row)}"] for model in models]
        assert quotes(" ".join(cells), *(m[k]["median"] for m in of for k in ("clock", "cores")))
    assert len(page) == 7
    ways = "released", "released, row ratio"
    work = [ratios[f"{m}, {way}"]["cores"]["median"] for way in ways for m in models]
    unclipped = ratios["width 512, released, row ratio, not clipped"]["cores"]["median"]
    assert quotes(answer("released step"), *work, unclipped)


def test_convergence_of_adama():
    page, summary = PAGE["AdamA: convergence"], result("adama_convergence")["summary"]
    first = tables("docs/adama.md")["# AdamA: moments gathered in the backward"]
    assert page.keys() == summary.keys()
    for row, (*cells, packed) in page.items():
        found = summary[row]
        of = found["less Adam"]
        assert quotes(" ".join(cells), found["Adam"], found["spread"], of["squares"], of["row"])
        assert quotes(packed, of["packed"]) if "packed" in of else not packed
    assert all(found["within"]["row"] for found in summary.values())
    assert answer("converge").startswith(f"with the row ratio in {len(page)} of {len(page)} cases")
    for model, cells in first.items():
        found = summary[f"{model}, beta2 0.95, N=8"]
        of = found["less Adam"]
        assert quotes(" ".join(cells), found["spread"], of["squares"], of["row"]), model
    gpt = [v for k, v in summary.items() if k.startswith("GPT")]
    beyond = [v for v in gpt if not v["within"]["squares"]]
    assert (len(beyond), len(gpt)) == (8, 12)
    small = [v for k, v in summary.items() if k.startswith("GPT, beta2")]
    shares = [100 * v["less Adam"]["squares"] / v["Adam"] for v in small]
    assert numbers(answer("converge"))[2:] == [f"{min(shares):.0f}", f"{max(shares):.0f}"]
    worse = [k for k, v in summary.items() if not v["row no worse than squares"]]
    assert len(worse) == 4
    assert all(k.startswith("ResNet") for k in worse)


def test_ratio_of_second_moments():
    page, summary = PAGE["The ratio of second moments"], result("adama_ratio")["summary"]
    for cells, found in zip(page.values(), summary.values(), strict=True):
        last = (found[f"{what} of the last 50 steps"] for what in ("mean", "median"))
        assert quotes(" ".join(cells), found["largest"], *last)


def test_first_steps_of_a_packed_sum():
    page, rows = PAGE["Why not a packed sum"], result("adama_packed")["results"]
    assert page.keys() == {"2", "4", "8"}
    for n, cells in page.items():
        longest = [rows[f"{way}, {n}"]["longest"] for way in ("squares", "row", "packed")]
        assert quotes(" ".join(cells), *longest, 100 * rows[f"packed, {n}"]["over twice"])
        assert max(longest[:2]) <= 1.001 * int(n) ** 0.5 < longest[2] / 100


SIGNALS = "SIGKILL", "SIGTERM", "SIGINT"


def test_runs_that_are_stopped():
    page, summary = PAGE["Runs that are stopped"], result("kills")["summary"]
    assert tuple(page) == SIGNALS
    for name, cells in page.items():
        row = summary[name]
        lost, again = row["steps lost that were saved"], row["most steps repeated"]
        assert quotes(" ".join(cells), row["stopped"], lost, again, row["after its run"])
        assert lost == 0
        assert row["tracebacks"] <= row["codes"].get("-2", 0), "others than Python's at an import"
    assert summary["ended"] == summary["as without"]
    sent = {n: summary[n]["stopped"] + summary[n]["after its run"] for n in SIGNALS}
    assert sent["SIGKILL"] >= 200
    assert sent["SIGTERM"] + sent["SIGINT"] >= 60
    assert quotes(answer("a run that is stopped"), sum(sent.values()), summary["ended"])


def test_two_processes_with_a_fault():
    page = PAGE["Two processes with a fault"]
    named = {"one process killed": "process_kills", "network cut": "network_cuts"}
    assert page.keys() == named.keys()
    for row, cells in page.items():
        found = result(named[row])["summary"]
        keys = ("processes that had to end", "ended within a minute", "with a message")
        counts = found["faults"], found["late"], *(found[key] for key in keys)
        seconds = found["seconds, median"], found["seconds, most"]
        rest = found["steps lost that were saved"], found["as without"], found["runs"]
        assert quotes(" ".join(cells), *counts, *seconds, *rest), row
        assert len({found[key] for key in keys}) == 1
        assert found["steps lost that were saved"] == 0
        assert found["as without"] == found["runs"]
        said = found["faults"], found["seconds, most"], found["runs"]
        assert quotes(answer("is killed" if row.endswith("killed") else "is cut"), *said)
    assert result("process_kills")["summary"]["faults"] >= 40


def test_a_larger_model_resumes_on_other_devices():
    page = PAGE["A larger model that resumes on other devices"]
    found = result("process_resumes")["results"]["gpt_345m"]
    assert quotes(page["without a fault, 4 devices"][0], *found["losses"])
    assert quotes(page["killed, resumed on 2 devices"][0], *found["resumed"])
    assert len(found["losses"]) == 10
    assert found["steps saved"] < 10
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    said = text.partition("checkpoint after step")[2]
    assert quotes(said, found["steps saved"])
    off = said.partition("difference of the losses is")[2]
    assert quotes(off, found["largest difference"])
    assert found["largest difference"] <= 1e-5


def test_time_of_two_processes():
    page, summary = PAGE["Time of two processes"], result("process_times")["summary"]
    assert page.keys() == summary.keys() == {"step", "save"}
    for row, cells in page.items():
        found = summary[row]
        ratios = (found["ratio"][key] for key in QUARTILES)
        assert quotes(" ".join(cells), found["1"], found["2"], *ratios), row
    assert quotes(
        answer("step of two processes"), *(summary[w]["ratio"]["median"] for w in summary)
    )


def test_faults_in_stored_checkpoints():
    page, rows = PAGE["Faults in stored checkpoints"], result("checkpoint_faults")["results"]
    total = result("checkpoint_faults")["summary"]
    for fault, cells in page.items():
        ours, orbax = rows[f"jaxmem, {fault}"], rows[f"orbax alone, {fault}"]
        names = "right values", "an error", "wrong values"
        of = [ours["the one before, with a warning"], ours.get("wrong values", 0)]
        assert quotes(" ".join(cells), *of, *(orbax.get(name, 0) for name in names))
    assert len(page) == 5
    assert total["jaxmem"].keys() == {"the one before, with a warning"}
    made, read = sum(total["jaxmem"].values()), sum(total["orbax alone"].values())
    assert made >= 1000
    wrong = total["orbax alone"]["wrong values"]
    assert quotes(answer("that were changed"), made, wrong, read)


def test_files_that_are_refused():
    page, found = PAGE["Configs and plans' files that are refused"], result("bad_files")
    kinds = found["results"]["configs"] | found["results"]["plans"]
    assert page.keys() == kinds.keys()
    for kind, cells in page.items():
        for cell, what in zip(cells, ("configs", "plans"), strict=True):
            row = found["results"][what].get(kind)
            assert cell == "–" if row is None else quotes(cell, row["refused"]), kind
    totals = [found["summary"][what]["refused"] for what in ("configs", "plans")]
    assert quotes(answer("with a mistake"), *totals)
    assert min(totals) >= 500
    assert all(row["refused"] == row["files"] for row in found["summary"].values())


def test_what_saving_costs():
    (cells,), found = list(PAGE["What saving costs"].values()), result("saving")["summary"]
    ratio, percent = cells[0], lambda one: 100 * (one - 1)
    values = percent(found["ratio, median"]), *map(percent, found["ratio, quartiles"])
    assert quotes(ratio, *values)
    assert quotes(cells[1], 1e3 * found["blocks, median"], 1e3 * found["blocks, most"])
    assert quotes(cells[2], found["whole, median"])
    assert values[0] <= 3
    assert quotes(answer("saving cost"), values[0], 1e3 * found["blocks, median"])


def test_a_plan_that_is_revised():
    found = result("rectified")
    for seed, cells in PAGE["A plan that is revised"].items():
        one = found["results"][f"trained, {seed}"]
        kept = one["everything kept"]["loss"]
        losses = [100 * (one[name]["loss"] / kept - 1) for name in ("first plan", "rectified")]
        last = max(r["step"] for r in one["rectified"]["decisions"] if r.get("event") == "swap")
        beyond = one["rectified"]["beyond room"]
        after = sum(n for step, n in beyond.items() if int(step) > last)
        taken = one["as planned"]
        assert quotes(cells[0], len(taken), sum(taken))
        assert quotes(cells[1].lstrip("+"), losses[0])
        assert quotes(cells[2].lstrip("+"), losses[1])
        assert quotes(cells[3], max(beyond.values()))
        assert quotes(cells[4], after)
    summary = found["summary"]
    worst = max(map(abs, summary["loss against everything kept"]["rectified"]["loss"]["by seed"]))
    assert worst <= 0.005
    total = sum(summary["plans taken"])
    assert quotes(answer("come and go").replace("three", "3"), total, 3, 100 * worst)
    for share, cells in PAGE["A stale plan against a rectified one"].items():
        row = found["results"][f"stale, {share}"]
        assert quotes(cells[0], row["ratio"], row["quartiles"][0], row["quartiles"][2])
        assert quotes(cells[1], row["predicted ratio"])
    assert summary["throughput between trackings"] >= 0.99


WAYS = {
    "everything kept": "no optimization",
    "full recomputation": "full recomputation",
    "every tag quantized": "quantization",
    "plan, lossless": "lossless",
    "plan, all actions": "plan",
    "plan, keep and recompute": "on the device",
}


def test_throughput_over_the_batch():
    page, found = PAGE["Throughput over the batch"], result("throughput")
    assert page.keys() == found["results"].keys()
    ways = "no optimization", "full recomputation", "quantization", "plan"
    for name, row in found["results"].items():
        for cell, way in zip(page[name], ways, strict=True):
            if way not in row:
                assert cell == "does not fit"
                continue
            assert quotes(cell, row[way]["sequences a second"], row[way]["bytes"] / 1e9), name
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    said = text.partition("divided by the throughput of full recomputation, is")[2]
    ends = (
        found["summary"][model][way]
        for way in ("full recomputation", "quantization")
        for model in ("gpt_117m", "gpt_345m")
    )
    assert quotes(said, *(end for pair in ends for end in pair))


def test_the_largest_batch():
    found, shares = result("max_batch")["results"], result("shares")["results"]
    models = "gpt_117m", "gpt_345m"
    for way, cells in PAGE["The largest batch"].items():
        for cell, model in zip(cells, models, strict=True):
            row = found.get(f"{model}, {WAYS[way]}")
            if row is None:
                assert cell == "not measured"
            else:
                host = [row["host bytes"] / 1e9] if row["host bytes"] else []
                assert quotes(cell, row["batch"], row["bytes"] / 1e9, *host), (way, model)
                assert row["bytes"] <= 32e9
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    batch = lambda model, way: found[f"{model}, {way}"]["batch"]
    for model in models:
        if f"{model}, lossless" in found:
            ratio = batch(model, "lossless") / batch(model, "full recomputation")
            assert f"{model}: {ratio:.2f}" in text
    pairs = [batch(m, way) for m in models for way in ("lossless", "full recomputation")]
    host = [found[f"{m}, lossless"]["host bytes"] / 1e9 for m in models]
    said = numbers(answer("large a batch fits"))
    assert [int(n) for n in said if n not in ("117", "345")] == [*pairs, *map(round, host)]
    kept, eight = (shares[f"gpt_345m, {n}"] for n in (4, 8))
    quoted = 100 * kept["activations"], 100 * eight["activations"], 100 * eight["recomputation"]
    assert f"activations are {quoted[0]:.0f} % of the bytes of gpt_345m with batch 4" in text
    assert f"{quoted[1]:.0f} % with batch 8" in text
    assert f"recomputation takes {quoted[2]:.0f} % of the step time" in text


def test_outliers():
    rows, summary = PAGE["With outlier channels"], result("outliers")["summary"]
    trained = {
        "own_codecs": ("by the codec of its kind, which separates outliers", "own codecs"),
        "grouped": (
            "by grouped INT4 in place of the codec that separates outliers",
            "grouped INT4",
        ),
        "naive": ("by naive per-token INT4", "naive INT4"),
    }
    for name, (row, layers) in trained.items():
        found = summary["validation_loss"][name]
        shares = found["relative_difference"], min(found["by_seed"]), max(found["by_seed"])
        assert quotes(rows[row][0], *(100 * share for share in shares)), name
        errors = summary["gradient_one_less_cosine_by_layer"][name]
        assert len(rows[layers]) == len(errors) == 4
        assert quotes(" ".join(rows[layers]), *errors), name
    means = (100 * summary["validation_loss"][name]["relative_difference"] for name in trained)
    assert quotes(answer("has outlier channels"), *means)
