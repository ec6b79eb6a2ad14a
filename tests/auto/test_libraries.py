"""Models of packages, as they ship, train under `jaxmem.auto` as they did."""

import functools

import jax
import numpy as np
import pytest

import jaxmem
from jaxmem.plans import Assignment
from tests.shared.foreign.size import Size

pytestmark = [
    pytest.mark.slow,
    pytest.mark.jax_defaults,
    # Transformers says that its Flax models are deprecated.
    pytest.mark.filterwarnings("default"),
]
SIZE = Size(width=32, heads=4, layers=3, batch=2, sequence=16, vocab=48)
NAMES = ("gpt2", "bert", "llama", "vit", "equinox_in_a_loop", "equinox_in_a_scan")


def model(name: str):
    from tests.shared.foreign import libraries

    equinox = functools.partial(libraries.equinox_transformer, scanned=name.endswith("scan"))
    return (equinox if name.startswith("equinox") else getattr(libraries, name))(SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_models_own(name):
    """To rounding in float32, relative to each leaf's largest gradient. A key's bias has none, but
    for rounding: such leaves are compared with the largest of all.
    """
    loss, params, args = model(name)
    value, want = jax.jit(jax.value_and_grad(loss))(params, *args)
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(want))
    for plan in (Assignment.everything(), Assignment.nothing()):
        got_value, got = jax.jit(jax.value_and_grad(jaxmem.auto(loss, plan)))(params, *args)
        assert float(got_value) == pytest.approx(float(value), rel=1e-6)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            size = float(np.abs(b).max())
            assert size > 0, "a gradient is zero: nothing is compared"
            assert float(np.abs(np.subtract(a, b)).max()) < 1e-6 * (
                size if size > 1e-4 * largest else largest
            )


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_it_has_its_layers_as_blocks(name):
    loss, params, args = model(name)

    def step(params, *args):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, *args))

    planned = jaxmem.auto(step)(Assignment.nothing())
    program = str(jax.make_jaxpr(planned)(params, *args))
    assert program.count("differentiated=True") == (1 if name.endswith("scan") else SIZE.layers)
