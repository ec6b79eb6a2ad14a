"""Losses that no released step divides, and wrong arguments of the released step of a loss."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import NoLayersError, OptimizerError
from tests.released.test_loss import (
    LAYERS,
    adam,
    feed_forward,
    layer_parameters,
    own,
    rows,
    with_a_counter,
)

pytestmark = [pytest.mark.core, pytest.mark.standard_promotion]


def reversed_layers(params, x):
    layer = lambda x, p: (feed_forward(x, p), None)
    return (jax.lax.scan(layer, x, own(params), reverse=True)[0] ** 2).mean()


def in_a_python_loop(params, x):
    for i in range(LAYERS):
        x = feed_forward(x, jax.tree.map(lambda a, i=i: a[i], own(params)))
    return (x**2).mean()


def regularized(params, x):
    layer = lambda x, p: (feed_forward(x, p), None)
    return (jax.lax.scan(layer, x, own(params))[0] ** 2).mean() + (params["up"] ** 2).sum()


def carries_a_key(params, x):
    def layer(carry, p):
        key, x = carry
        key, used = jax.random.split(key)
        return (key, feed_forward(x, p) + jax.random.normal(used, x.shape)), None

    (_, x), _ = jax.lax.scan(layer, (jax.random.key(0), x), own(params))
    return (x**2).mean()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (reversed_layers, r"the scan at .*test_loss_refused\.py.*it runs backward"),
        (
            in_a_python_loop,
            r"Python loop at .*test_loss\.py.* reads a parameter that nothing else",
        ),
        (lambda p, x: (x @ p["embedding"]).mean(), "it has no loop.*stack the layers' parameters"),
        (regularized, r"`params\['up'\]` is sliced by the loop .* and is also read at"),
        (carries_a_key, "carries key.*has no gradient.*slice keys"),
    ],
)
def test_a_loss_that_cannot_be_divided_is_refused(loss, says):
    with pytest.raises(NoLayersError, match=says):
        jaxmem.released_step(adam(), loss).init(layer_parameters(), rows())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: jaxmem.released_step(adam(), "loss"), "`loss` is str; expected a function"),
        (lambda: jaxmem.released_step(adam(), reversed_layers, dtype="bfloat16"), "a whole loss"),
        (
            lambda: jaxmem.released_step(jaxmem.adama(0.1, axis_name="x"), reversed_layers),
            "a whole loss",
        ),
        (
            lambda: jaxmem.released_step(adam(), lambda p, x: (x.mean(), x)).init(
                layer_parameters(), rows()
            ),
            r"`loss` returned .*; expected the microbatch's mean loss",
        ),
        (
            lambda: jaxmem.released_step(
                jaxmem.adama(0.1, accumulation_steps=3), with_a_counter
            ).init(layer_parameters(), {"x": rows()}),
            r"`batch\['x'\]` has shape \(8, 16\); expected a leading axis",
        ),
        (
            lambda: jaxmem.released_step(adam(), with_a_counter)(layer_parameters(), rows()),
            "`state` is dict; expected the pair",
        ),
        (
            lambda: jaxmem.released_step(adam(), with_a_counter).init(
                layer_parameters() | {"count": jnp.int32(0)}, rows()
            ),
            r"`params\['count'\]` is int32; expected floating-point",
        ),
    ],
)
def test_wrong_arguments_are_named(make, says):
    with pytest.raises(OptimizerError, match=says):
        make()
