"""Training steps as the planner gets them, with shapes of their arguments: of our configs, and of
models that know nothing of jaxmem; and steps compiled without the planner.
"""

import functools
from collections.abc import Callable

import jax

import jaxmem
from experiments.command.load import load
from experiments.steps.step import abstract, make_step
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.export import export_flat
from tests.shared.foreign.size import Size

SIZES = {
    "local": Size(width=128, heads=4, layers=6, batch=8, sequence=144, vocab=256),
    "h200": Size(width=256, heads=8, layers=6, batch=16, sequence=576, vocab=512),
    "h200:8": Size(width=256, heads=8, layers=6, batch=64, sequence=256, vocab=512),
}
RATE = 1e4  # what a parameter moves by is its gradient: the rest is lost in rounding


def of_config(name: str) -> tuple[Callable, tuple]:
    config = load(name, ())
    return functools.partial(make_step, config), abstract(config)


def of_others(make: Callable) -> tuple[Callable, tuple]:
    loss, params, rest = make(SIZES["local"])
    return jaxmem.auto(step_of(loss)), shapes((params, *rest))


def step_of(loss: Callable) -> Callable:
    """A training step by plain descent, so that what it changes is the gradient."""

    def step(params, *rest):
        first = lambda params: jax.tree.leaves(loss(params, *rest))[0]
        value, gradients = jax.value_and_grad(first)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), value

    return step


def shapes(tree):
    def shape(a):
        if isinstance(a, jax.ShapeDtypeStruct):
            return a
        return jax.ShapeDtypeStruct(a.shape, a.dtype)

    return jax.tree.map(shape, tree)


@functools.cache
def compiler(target: str) -> Compiler:
    """Compiles for a target without hardware, in a process that ends with this process."""
    return Compiler(target, workers=1)


def compiled(target: str, traced, capability: int | None = None, options=None) -> Compiled:
    """A traced step, compiled for a target without hardware. `capability` is the GPU's, for the
    kernels in the step.
    """
    found = compiler(target)
    exported, donated = export_flat(traced, found.target.platform, capability)
    return found.submit(exported, donated=donated, options=options).result()
