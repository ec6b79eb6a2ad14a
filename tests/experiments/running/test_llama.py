"""The command line on a Llama: it learns, a plan of its tags keeps a budget and the losses, and
what was stored goes on as if it had not been.
"""

import functools
import json

import jax
import numpy as np
import pytest

import jaxmem
from experiments import train
from experiments.command.load import load
from experiments.running import policies
from experiments.steps.step import abstract, init_state, make_step
from tests.experiments.states import user_numerics

pytestmark = pytest.mark.jax_defaults

TEXT = "".join(f"def function_{i}(x):\n    return x + {i * i}\n\n" for i in range(400))
MICRO = (
    "model.layers=2", "model.width=32", "model.hidden=96", "train.steps=6", "train.batch=8",
    "train.sequence=64", "train.loss_chunk=32", "train.eval_batches=1", "optimizer.warmup=1",
    "sample.length=0", "optimizer.learning_rate=1e-2", "plan.actions=lossless",
)  # fmt: skip
WAYS = {
    "scan": (),
    "released": (
        "model.loop=stack", "optimizer.accumulation=released", "optimizer.clip=component",
        "train.microbatches=2",
    ),
}  # fmt: skip


def read(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads((out / "summary.json").read_text()), rows


@pytest.fixture(scope="module", params=["scan", pytest.param("released", marks=pytest.mark.slow)])
def runs(request, tmp_path_factory):
    """Folders of two runs: unplanned, and planned for 70 % of its bytes; and that budget."""
    place = tmp_path_factory.mktemp(request.param)
    (place / "text.py").write_text(TEXT, encoding="utf-8")
    settings = (*MICRO, *WAYS[request.param], f"data.path={place / 'text.py'}")
    run = lambda budget, name: train.main(
        ["llama_nano", *settings, f"plan.budget={budget}", "--out", str(place / name)]
    )
    with user_numerics():
        assert run("none", "unplanned") == 0
        budget = read(place / "unplanned")[0]["compiled_bytes"] * 7 // 10
        assert run(budget, "planned") == 0
    return place / "unplanned", place / "planned", budget


@pytest.mark.slow
def test_it_learns(runs):
    summary, rows = read(runs[0])
    assert 5.3 < summary["first_loss"] < 5.8  # a byte: log 256 is 5.55
    assert summary["val_loss"] < summary["first_loss"] - 0.5
    assert len(rows) == 6


@pytest.mark.slow
def test_a_plan_keeps_its_budget_and_the_unplanned_losses(runs):
    unplanned, planned, budget = runs
    (plain, plain_rows), (summary, rows) = read(unplanned), read(planned)
    assert summary["compiled_bytes"] <= budget < plain["compiled_bytes"]
    losses = lambda rows: [row["loss"] for row in rows]
    np.testing.assert_allclose(losses(rows), losses(plain_rows), rtol=1e-4)
    np.testing.assert_allclose(summary["val_loss"], plain["val_loss"], rtol=1e-4)


@pytest.mark.slow
def test_the_tensors_of_a_plan_are_the_tags_with_their_bytes(runs):
    plan = jaxmem.Plan.load(runs[1] / "plan.json")
    assert {row.tag: row.kind for row in plan.rows} == policies.LLAMA_KINDS
    (rows,) = {row.shape[0] for row in plan.rows}  # of a batch, or of a microbatch
    features = {"k": 16, "v": 16, "probs": 4 * 64, "gate": 96, "up": 96, "sigmoid": 96, "glu": 96}
    for row in plan.rows:
        assert row.bytes_before == rows * 64 * features.get(row.tag, 32) * 4, row.tag
    assert not plan.keeps_everything


@functools.cache
def released_step():
    config = load("llama_nano", (*MICRO, *WAYS["released"]))
    return config, jax.jit(make_step(config)).lower(*abstract(config)).compile()


@pytest.mark.slow
def test_what_was_stored_goes_on_as_if_it_had_not_been(tmp_path):
    import orbax.checkpoint as ocp

    config, step = released_step()
    rng, shape = np.random.default_rng(0), (config.train.batch, config.train.sequence + 1)
    batches = [rng.integers(0, 256, shape).astype(np.int32) for _ in range(4)]
    state = jax.jit(functools.partial(init_state, config))()
    for batch in batches[:2]:
        state, _ = step(state, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", abstract(config)[0])
    for batch in batches[2:]:
        (state, metrics), (restored, same) = step(state, batch), step(restored, batch)
        assert metrics["loss"] == same["loss"]
    jax.tree.map(np.testing.assert_array_equal, state, restored)
