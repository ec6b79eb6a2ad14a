"""Outliers of tensors, callbacks and codecs that are out of the ordinary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._train.rectifier.track import Tracker
from jaxmem.errors import StepError
from tests.shared import outlier_layers as layers
from tests.shared.outlier_layers import batch, build, loss_of, oracle, parameters, tracked


def test_a_gradient_of_each_example_has_tensors_of_its_own():
    def of(plan):
        loss = loss_of(plan)
        return lambda p, x: jax.vmap(jax.grad(loss), (None, 0))(p, x)

    p, x = parameters(), batch(2)
    found = tracked(of, p, x)
    each = [oracle(p, part[None]) for part in x]
    for one in found:  # layer by layer, and in each the examples
        scores = [of_one[one.tag][i] for i in range(layers.LAYERS) for of_one in each]
        assert one.counts == tuple(int((z > 3).sum()) for z in scores)


def test_codecs_that_were_asked_for_say_what_is_counted():
    def of(plan):
        def layer(x, p):
            return x + jaxmem.tag(jnp.sin(x @ p["up"]), "h") @ p["down"]  # of no kind

        return jax.grad(loss_of(plan, layer))

    args = {k: v for k, v in parameters().items() if k != "gain"}, batch()
    with pytest.raises(StepError, match="has no tensor to track"):
        Tracker(of, args)
    tracker = Tracker(of, args, "outlier_separated(capacity=1)")
    (found,) = tracker.read(1, tracker(*args))
    assert found.tag == "h"
    kinds = ("norm", "linear", "gelu", "residual")
    with pytest.raises(StepError, match="has no tensor to track"):
        Tracker(build, (parameters(), batch()), dict.fromkeys(kinds, "grouped_symmetric()"))


def read_by_recomputation_alone(x, p):
    """What another tag stands for is read by no backward, and may be compressed all the same."""
    h = jaxmem.tag(x @ p["up"], "h", kind="linear")
    return jaxmem.tag(h @ p["down"] + x, "out", kind="residual")


def of_several_widths(x, p):
    h = jaxmem.tag(jnp.sin(x @ p["up"]), "h", kind="linear")
    empty = jaxmem.tag(x[..., :0], "empty", kind="norm").sum()
    return x + jaxmem.tag(jnp.sin(h @ p["down"]), "h", kind="linear") + empty


@pytest.mark.parametrize(
    ("layer", "widths"),
    [
        (read_by_recomputation_alone, {("h", layers.HIDDEN), ("out", layers.WIDTH)}),
        (of_several_widths, {("h", layers.HIDDEN), ("h", layers.WIDTH), ("empty", 0)}),
    ],
)
def test_every_tensor_is_counted(layer, widths):
    p = {k: v for k, v in parameters().items() if k != "gain"}
    found = tracked(lambda plan: jax.grad(loss_of(plan, layer)), p, batch())
    assert {(one.tag, one.channels) for one in found} == widths


def test_callbacks_are_made_once():
    said = []

    def of(plan, callback):
        def layer(x, p):
            callback(x)
            return layers.block(x, p)

        return jax.grad(loss_of(plan, layer))

    p, x = parameters(), batch()
    debugging = lambda x: jax.debug.callback(lambda y: said.append(y), x.sum())
    found = tracked(lambda plan: of(plan, debugging), p, x)
    jax.effects_barrier()
    assert found
    assert not said

    def reading(plan):
        def step(p, x):
            shape = jax.ShapeDtypeStruct((), x.dtype)
            one = jax.experimental.io_callback(lambda: np.float64(1.0), shape)
            return jax.grad(loss_of(plan))(p, x * one)

        return step

    with pytest.raises(StepError, match="io_callback, which counting would call once more"):
        tracked(reading, p, x)
