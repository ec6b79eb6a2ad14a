import jax
import jax.numpy as jnp
import pytest

from jaxmem._target.devices.random_bits import MANY, random_notes
from jaxmem._target.devices.target import Target


def step(impl: str, count: int):
    def dropped(x):
        drawn = lambda: jax.random.uniform(jax.random.key(0, impl=impl), (count,)).sum()
        return jax.lax.scan(lambda c, _: (c + drawn(), None), x, None, 3)

    return jax.make_jaxpr(dropped)(jnp.float32(0)).jaxpr


@pytest.mark.parametrize(
    ("impl", "count", "target", "told"),
    [
        ("threefry2x32", MANY, "v5e", True),
        ("threefry2x32", MANY - 1, "v5e", False),
        ("rbg", MANY, "v5e", False),
        ("threefry2x32", MANY, "h200", False),
    ],
)
@pytest.mark.jax_defaults
def test_many_numbers_by_threefry_are_told_of_on_a_tpu(impl, count, target, told):
    notes = random_notes(step(impl, count), Target.parse(target))
    assert len(notes) == told
    if told:
        assert f"{count:,} random numbers" in notes[0]
        assert "jax_default_prng_impl" in notes[0]
