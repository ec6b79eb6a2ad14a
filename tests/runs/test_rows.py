"""What a row says beside the metrics: seconds, what is done in one, and the device's bytes."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

from jaxmem._train.runs.rows import StepMeter
from jaxmem.errors import RunError
from jaxmem.runs import record, train


def trained(out, **given):
    step = lambda state, batch: (state + 1, {"losses": state})
    with record(out, resume=True) as run:
        train(step, jnp.zeros(2), lambda n: None, steps=3, run=run, save_every=1e6, **given)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_units_are_told_by_the_second(tmp_path):
    first, *others = trained(tmp_path, units={"tokens": 128, "images": 2.5})
    assert first.keys() == {"step"}, "what the first took is not known"
    for row in others:
        assert row["tokens_per_second"] == pytest.approx(128 / row["step_seconds"])
        assert row["images_per_second"] == pytest.approx(2.5 / row["step_seconds"])


@pytest.mark.parametrize("count", [0, "many", float("nan")])
def test_what_cannot_be_counted_is_refused(tmp_path, count):
    with pytest.raises(RunError, match=f"has {count!r} for 'tokens'"):
        trained(tmp_path, units={"tokens": count})


@pytest.mark.parametrize(
    ("stats", "peak"),
    [
        ([None], None),
        ([{}], None),
        ([{"bytes_in_use": 5}], None),
        ([{"peak_bytes_in_use": 7}, None, {"peak_bytes_in_use": 9}], 9),
    ],
)
def test_the_most_that_a_device_had_in_use_is_told_where_it_tells(monkeypatch, stats, peak):
    devices = [types.SimpleNamespace(memory_stats=lambda one=one: one) for one in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    measured = StepMeter({})
    assert [measured(number).get("peak_bytes") for number in (1, 2)] == [peak] * 2
