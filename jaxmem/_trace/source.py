"""Tells where in the user's program an operation stands."""

import os
import pathlib

from jax.extend import source_info_util

from jaxmem._trace.jaxpr import JaxprEqn

_FRAMES = 32  # of the call stack that are looked at
_PACKAGES = "site-packages" + os.sep
# What stands in them says what is computed, and not which part of a model it is.
_LAYERS = (
    str(pathlib.Path(__file__).parents[1]) + os.sep,
    *(_PACKAGES + name + os.sep for name in ("flax", "equinox", "haiku", "optax")),
)


def place_of(eqn: JaxprEqn) -> str:
    """The file, line and function that an equation is from, such as "model.py:12:8 (mlp)": the
    innermost line of a model, the user's own or a package's, if there is one, and not of jaxmem's
    or a library of layers. The path is relative to the working directory, or to where packages are.
    "" where JAX kept no trace.
    """
    told = source_info_util.summarize(eqn.source_info, num_frames=_FRAMES)
    frames = [line for line in reversed(told.splitlines()) if line != "unknown"]  # innermost first
    models = [f for f in frames if not any(library in f for library in _LAYERS)]
    place = next(iter(models or frames), "")
    _, installed, inside = place.rpartition(_PACKAGES)
    return inside if installed else place.removeprefix(os.getcwd() + os.sep)
