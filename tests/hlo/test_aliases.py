"""Results that take the buffer of an argument in another memory, read from optimized modules."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem._target.hlo.transfers import misplaced

pytestmark = pytest.mark.jax_defaults
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
PAIR = (
    "HloModule f, input_output_alias={{ {aliases} }},"
    " entry_computation_layout={{({given})->{made}}}"
)
FAR, NEAR = "f32[4,8]{1,0:S(5)}", "f32[4,8]{1,0}"


@pytest.mark.parametrize(
    ("aliases", "given", "made", "found"),
    [
        ("{0}: (0, {}, may-alias)", FAR, f"({NEAR}, {FAR})", ("f32[4,8]",)),
        ("{1}: (0, {}, may-alias)", FAR, f"({NEAR}, {FAR})", ()),
        ("{0}: (1, {}, may-alias), {1}: (0, {})", f"{FAR}, {NEAR}", f"({NEAR}, {FAR})", ()),
        (
            "{0}: (1, {}, may-alias), {1}: (0, {}, must-alias)",
            f"{FAR}, {NEAR}, s32[]",
            f"({FAR}, /*index=1*/{NEAR}, s32[]{{:T(128)}})",
            ("f32[4,8]", "f32[4,8]"),
        ),
        ("{}: (0, {}, may-alias)", NEAR, FAR, ("f32[4,8]",)),
        ("{}: (0, {}, may-alias)", FAR, FAR, ()),
    ],
)
def test_pairs_in_unlike_memories_are_found(aliases, given, made, found):
    head = PAIR.format(aliases=aliases, given=given, made=made)
    assert misplaced(f"{head}, num_partitions=2\n\nENTRY %main () -> f32[] {{") == found


def test_a_module_without_donated_arguments_has_none():
    assert misplaced(f"HloModule f, entry_computation_layout={{({FAR})->({NEAR})}}\n") == ()
    assert misplaced("") == ()


@pytest.mark.parametrize(("first", "found"), [("metric", ("f32[4,8]",)), ("state", ())])
def test_jax_pairs_arguments_with_results_in_their_order_alone(first, found):
    """A CPU has both memories: a step that returns a metric before its state would end the process
    when it runs.
    """
    near = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    there = near.with_memory_kind("pinned_host")

    def step(state):
        value = jax.device_put(state, DEVICE)
        metric, state = jnp.ones((4, 8)) * value.sum(), jax.device_put(value + 1, HOST)
        return (metric, state) if first == "metric" else (state, metric)

    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=there)
    compiled = jax.jit(step, donate_argnums=0).lower(shape).compile()
    assert misplaced(compiled.as_text()) == found
