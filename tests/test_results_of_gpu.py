"""What docs/results.md and docs/kernels.md quote of a GPU is in the committed results."""

import json
import statistics

import pytest

from jaxmem._target.devices.chips import GPUS
from jaxmem._target.devices.rates import rates_of
from tests.shared.quoted import PAGE, ROOT, answer, quotes, result, tables

FOUND = result("gpu_117m")["summary"]
STEPS = FOUND["steps"]
ABSENT, PEAK = "bytes, compiled without the GPU", "bytes, the device's peak"


def check(part: str) -> dict:
    path = ROOT / "benchmarks" / "results" / "gpu_check" / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def key_of(row: str) -> str:
    return row.replace("plan, ", "plan ") if row.startswith("plan") else f"policy {row}"


def test_steps_on_an_h200():
    page = {key_of(row): cells for row, cells in PAGE["On an H200"].items()}
    assert page.keys() == STEPS.keys()
    assert [*page] == sorted(STEPS, key=lambda key: STEPS[key][ABSENT])
    for key, cells in page.items():
        step, ratio = STEPS[key], FOUND["against the best policy"].get(key, {}).get("ratio")
        assert quotes(" ".join(cells[:2]), step[ABSENT] / 1e9, step[PEAK] / 1e9), key
        assert quotes(cells[2], 1e3 * step["predicted_seconds"]), key
        assert quotes(cells[3], 1e3 * step["seconds"]["median"]), key
        assert quotes(cells[4], *([] if ratio is None else [ratio])), key


def test_what_the_summary_says_of_steps_on_an_h200():
    off = FOUND["largest |compiled / peak - 1|"]
    assert quotes(answer("compiled without the GPU"), 14, 100 * off)
    longer = {key: 1 / (1 + step["apart"]) for key, step in STEPS.items()}
    offloads = {"policy minimal_offloaded", "plan all 0.02", "plan all 0.2"}
    offloads |= {key for key in STEPS if "lossless" in key}
    without = max(ratio for key, ratio in longer.items() if key not in offloads)
    most = max(longer[key] for key in offloads)
    assert quotes(answer("predicted before"), 100 * FOUND["median |apart|"], 14, without, most)
    ratio = lambda name: FOUND["against the best policy"][f"plan {name}"]["ratio"]
    ends = sorted(ratio(key.removeprefix("plan ")) for key in offloads if key.startswith("plan"))
    cell = answer("faster on a GPU").replace("INT4", "")
    assert quotes(
        cell, ratio("all 0.5"), ratio("device 0.1"), ratio("recompute 0.2"), ends[0], ends[-1]
    )


def test_bytes_compiled_with_both_kinds_of_kernels():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").replace("\n", " ")
    (said,) = (one for one in text.split("- **") if one.startswith("Bytes with other kernels"))
    found = result("gpu_bytes")
    rows = [row for key, row in found["results"].items() if key in STEPS]
    assert len(rows) == len(STEPS) == 14
    percent = lambda row, name: 100 * (row[name] / row["peak_bytes"] - 1)
    triton, library = ([percent(row, name) for row in rows] for name in ("triton", "library"))
    same = [row["same_program"] for row in rows]
    ends = {
        name: [100 * found["summary"][name][end] for end in ("least", "most")]
        for name in ("triton", "library")
    }
    assert found["summary"]["steps"] == sum(same) == 11
    assert abs(ends["triton"][1]) < 0.01
    after = said.partition("as jaxmem compiles")[2]
    assert quotes(after, -ends["triton"][0], -ends["library"][0], ends["library"][1])
    below = [(t, one) for t, one in zip(triton, library) if one < -3]
    assert len(below) == 3
    assert all(abs(t) < 0.01 and 3.5 < -one < 5.5 for t, one in below)
    others = [(-t, -one) for t, one, kept in zip(triton, library, same) if not kept]
    after = after.partition("other kernels since. ")[2]
    assert quotes(after, min(others)[0], max(others)[0], max(one for _, one in others))
    greater = [max(pair) for pair in zip(triton, library)]
    assert quotes(after.partition("The greater of both")[2], -min(greater), max(greater))


def test_todays_prices_are_near_the_policies_times():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").replace("\n", " ")
    (said,) = (one for one in text.split(". ") if "seven policies have" in one)
    told = result("gpu_plans")["results"]
    apart = []
    for key, step in STEPS.items():
        if key.startswith("policy"):
            row = told[f"gpt_117m {key}"]
            seconds = row["xla_seconds"] + row["host_seconds"]
            apart.append(abs(seconds / step["seconds"]["median"] - 1))
    assert len(apart) == 7
    assert quotes(said, 100 * statistics.median(apart))


def test_rates_of_an_h200():
    rates = PAGE["Rates of an H200"]
    measured = check("ceilings")["summary"]
    points = "copy", "matmul_bfloat16", "matmul_float32", "link_to_host", "link_to_device"
    points += "link_both", "codec_encode", "codec_decode"
    for (row, cells), point in zip(rates.items(), points, strict=True):
        scale = 1e9 if "link" in row else 1e12
        assert quotes(cells[0], measured[point] / scale), row
    found = rates_of(GPUS["h200"])
    assert found.bandwidth == pytest.approx(measured["copy"])
    assert found.flops_16bit == pytest.approx(measured["matmul_bfloat16"])
    assert found.link == pytest.approx(min(measured["link_to_host"], measured["link_to_device"]))
    assert found.codec == pytest.approx(min(measured["codec_encode"], measured["codec_decode"]))


def test_codecs_on_an_h200():
    page = tables("docs/kernels.md")["On an H200"]
    rows = check("codecs")["rows"]
    for row, cells in page.items():
        name = row.replace(", ", " ").replace("stochastic", "STOCHASTIC").replace(" ", "_")
        name = name.replace("-", "_").replace("_STOCHASTIC", " stochastic")
        expected = []
        for way in ("encode", "decode"):
            found = rows[f"{name} {way} {2**24}"]
            assert found["is_kernel"]
            expected += [found["gigabytes_per_second"], found["of_reference"]]
        for cell, value in zip(cells, expected, strict=True):
            assert quotes(cell, value), row
    symmetric = rows["equals its reference: grouped_symmetric"]
    assert (symmetric["values"], symmetric["differ"][0]) == (2**24, 1039)
