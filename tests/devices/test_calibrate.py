"""Measured rates take the datasheet's place, and nothing else does."""

import json

import pytest

from jaxmem._target.devices import calibrate as _calibrate
from jaxmem._target.devices import rates as _rates
from jaxmem._target.devices.calibrate import calibrate
from jaxmem._target.devices.chips import GPUS, TPUS
from jaxmem._target.devices.target import Target
from jaxmem.errors import TargetError

RATES = {
    "copy": 4.3e12,
    "matmul_bfloat16": 790e12,
    "matmul_float32": 400e12,
    "matmul_float32_highest": 50e12,
}
RATES |= {"link_to_host": 50e9, "link_to_device": 55e9, "link_both": 40e9}
RATES |= {"codec_encode": 3.7e12, "codec_decode": 3.5e12}


def check(**changes) -> dict:
    rows = {point: {"rate": {"median": rate}} for point, rate in RATES.items()}
    found = {"small": False, "device": "NVIDIA H200", "versions": {}, "command": "c", "rows": rows}
    return found | changes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(_rates, "MEASURED", tmp_path / "measured")
    monkeypatch.setattr(_calibrate, "MEASURED", tmp_path / "measured")
    return tmp_path


def write(folder, data):
    (folder / "ceilings.json").write_text(data if isinstance(data, str) else json.dumps(data))


def test_a_target_takes_what_was_measured(folder):
    before = Target.parse("h200")
    assert before.bandwidth == GPUS["h200"].bandwidth
    write(folder, check())
    made = calibrate(folder)
    after = Target.parse("h200")
    rates = after.bandwidth, after.matmul_flops, after.flops_f32, after.link
    assert rates == (4.3e12, 790e12, 400e12, 50e9)
    assert Target.parse("h100-80gb").bandwidth == GPUS["h100-80gb"].bandwidth
    assert "bandwidth      4.3e+12  4.8e+12  89.6%" in made
    assert before.link_ways is None
    assert after.link_ways == (55e9, 50e9)
    assert "link_to_device 5.5e+10  5.12e+10  107.4%" in made
    saved = json.loads((folder / "measured" / "h200.json").read_text())
    assert saved["command"] == "c"
    assert list((folder / "measured").iterdir()) == [folder / "measured" / "h200.json"]


def test_a_tpu_too(folder):
    share = 0.9 * TPUS["v5e"].bandwidth / RATES["copy"]
    slower = {point: {"rate": {"median": share * rate}} for point, rate in RATES.items()}
    flops, link = TPUS["v5e"].flops_16bit, TPUS["v5e"].pcie
    for point in slower:
        if point.startswith(("matmul", "link")):
            slower[point]["rate"]["median"] = 0.7 * (flops if point[0] == "m" else link)
    write(folder, check(device="TPU v5 lite", rows=slower))
    assert calibrate(folder).startswith("v5e: measured")
    assert Target.parse("v5e:2x2").bandwidth == pytest.approx(0.9 * TPUS["v5e"].bandwidth)
    assert Target.parse("v6e").bandwidth == TPUS["v6e"].bandwidth


def test_what_an_older_check_left_is_read(folder):
    """One rate for both ways."""
    write(folder, check())
    calibrate(folder)
    path = folder / "measured" / "h200.json"
    saved = json.loads(path.read_text())
    for way in _rates.WAYS:
        del saved[way]
    path.write_text(json.dumps(saved))
    older = Target.parse("h200")
    assert (older.link, older.link_ways) == (50e9, None)
    assert older.bandwidth == 4.3e12


def test_another_file_changes_no_target(folder):
    write(folder, check())
    calibrate(folder, folder / "mine.json")
    assert (folder / "mine.json").exists()
    assert Target.parse("h200").bandwidth == GPUS["h200"].bandwidth


def rows(**changes):
    made = check()["rows"] | changes
    return check(rows={k: v for k, v in made.items() if v is not None})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "cannot read .*ceilings.json"),
        ([], "has no `rows`"),
        (check(small=True), "a rehearsal"),
        (check(device="cpu"), "is of device 'cpu'; expected one of t4"),
        (rows(copy=None), r"`rows.copy.rate.median` is None"),
        (rows(copy={"error": "out of memory"}), r"`rows.copy.rate.median` is None"),
        (rows(copy={"rate": {"median": "nan"}}), "is 'nan'; expected a rate"),
        (rows(copy={"rate": {"median": True}}), "is True; expected a rate"),
        (rows(copy={"rate": {"median": -1.0}}), "expected a rate above 0"),
        (rows(copy={"rate": {"median": 9e12}}), r"`bandwidth` is 9e\+12.*measure again"),
        (rows(link_to_host={"rate": {"median": 1e6}}), "`link` is 1e"),
        (rows(link_to_device={"rate": {"median": 90e9}}), r"`link_to_device` is 9e\+10"),
    ],
)
def test_results_that_cannot_be_used(folder, data, message):
    write(folder, data)
    with pytest.raises(TargetError, match=message):
        calibrate(folder)
    assert not (folder / "measured").exists()


def test_no_results_or_no_place(folder):
    with pytest.raises(TargetError, match=r"cannot read .*absent"):
        calibrate(folder / "absent")
    write(folder, check())
    (folder / "file").write_text("")
    with pytest.raises(TargetError, match="cannot write"):
        calibrate(folder, folder / "file" / "x.json")


def test_what_the_package_holds_is_whole():
    for path in _rates.MEASURED.glob("*.json"):
        assert path.stem in GPUS
        keys = json.loads(path.read_text()).keys()
        assert keys >= {"device", "versions", "command", *_rates.NAMES}
