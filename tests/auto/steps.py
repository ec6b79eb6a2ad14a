"""A model's loss, and what tests of its training steps share."""

import jax

from jaxmem._model.auto.calls import traced
from jaxmem._model.auto.find import Finder, read
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem.plans import Assignment
from tests.shared.foreign import plain as models

NOTHING = Assignment.nothing()
LOSS, PARAMS, ARGS = models.gemma_in_a_scan()


def update(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def blocks_in(step, *args) -> int:
    """How many blocks of jaxmem's are in the backward of a step, by its trace's text."""
    with todays_checkpoint():
        return str(jax.make_jaxpr(step)(*args)).count("differentiated=True")


def scanned(params, x, layer):
    """The loss of layers in a scan."""
    return (jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0] ** 2).mean()


def unrolled(params, x, layers):
    """The loss of layers in a Python loop."""
    for i, layer in enumerate(layers):
        x = layer(x, jax.tree.map(lambda a, i=i: a[i], params))
    return (x**2).mean()


def layers_of(loss, *args) -> list:
    """Returns the layers that are found in a loss."""
    finder, (closed, call) = Finder(NOTHING), traced(loss, args, {})
    with todays_checkpoint():
        jax.eval_shape(lambda: call(finder.with_blocks(read(closed)).run))
    return finder.found
