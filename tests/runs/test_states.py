"""States of all kinds, wherever they lie, go on as they were."""

import jax
import jax.numpy as jnp
import pytest

from tests.shared.training import alike, rows, stopped


def test_states_lie_where_they_did(tmp_path):
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    first = lambda: {"a": jax.device_put(jnp.arange(4.0), host), "n": jnp.int32(0)}

    def step(state, batch):
        assert state["a"].sharding == host
        return state | {"n": state["n"] + 1}, {"loss": state["n"]}

    alike(*stopped(tmp_path, step, first))


STATES = {
    "a number that becomes an array": (
        lambda s, b: ({"w": s["w"] + b, "n": s["n"] + 1}, {"loss": b}),
        lambda: {"w": jnp.zeros(3), "n": 0},
    ),
    "arrays of a weak type": (
        lambda s, b: (
            {"w": s["w"] * s["by"] + b.astype(jnp.bfloat16), "by": s["by"] * 1.01},
            {"loss": jnp.sum(s["w"]).astype(jnp.float32)},
        ),
        lambda: {"w": jnp.ones(3, jnp.bfloat16), "by": jnp.full(3, 1.01)},
    ),
    "a metric with the name of the step": (
        lambda s, b: (s + b, {"loss": b, "step": b * 1000, "text": None}),
        lambda: jnp.zeros(()),
    ),
}


@pytest.mark.quick("a number that becomes an array", "a metric with the name of the step")
@pytest.mark.parametrize("name", STATES)
def test_states_of_all_kinds_go_on(tmp_path, name):
    step, first = STATES[name]
    jitted = jax.jit(step) if "text" not in name and "metric" not in name else step
    got, want = stopped(tmp_path, jitted, first)
    alike(got, want)
    assert rows(tmp_path / "failing") == rows(tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]


def test_a_first_state_that_is_given_is_kept(tmp_path):
    first = jnp.ones(3)
    step = lambda s, b: (s + b, {"loss": jnp.sum((s - first) ** 2)})
    alike(*stopped(tmp_path, step, first))


def test_a_model_that_can_be_called_is_a_state(tmp_path):
    model = jax.tree_util.Partial(jnp.multiply, jnp.ones(3))
    step = lambda m, b: (jax.tree.map(lambda a: a + b, m), {"loss": m(b).sum()})
    alike(*stopped(tmp_path, step, model))
