"""Tells of random numbers that a target draws at a cost which no plan can take away."""

import math

from jaxmem._target.devices.target import Target
from jaxmem._trace.jaxpr import Jaxpr, equations

MANY = 2**20  # random numbers of one array; smaller arrays give no note
THREEFRY = "key<fry>"  # the dtype of JAX's default generator's keys


def random_notes(jaxpr: Jaxpr, target: Target) -> tuple[str, ...]:
    """Returns notes about a step that draws many random numbers by threefry on a TPU. XLA then
    writes dozens of arrays as large as the array that is drawn.

    jaxpr: the step's.
    """
    if target.traits.cheap_random_bits:
        return ()
    drawn = (e for e in equations(jaxpr) if e.primitive.name == "random_bits")
    by_threefry = lambda eqn: str(eqn.invars[0].aval.dtype) == THREEFRY
    most = max((math.prod(e.params["shape"]) for e in drawn if by_threefry(e)), default=0)
    if most < MANY:
        return ()
    return (
        f"the step draws up to {most:,} random numbers at once by threefry, JAX's default, of which"
        " XLA writes dozens of arrays on a TPU; with"
        " jax.config.update('jax_default_prng_impl', 'rbg') it writes few, and draws other numbers",
    )
