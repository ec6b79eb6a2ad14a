"""Tells where in the user's program an operation stands."""

import os
import pathlib

from jax.extend import source_info_util

from jaxmem._jax.jaxpr import JaxprEqn

_FRAMES = 32  # of the call stack that are looked at
_OURS = str(pathlib.Path(__file__).parents[1]) + os.sep


def place_of(eqn: JaxprEqn) -> str:
    """The file, line and function that an equation is from, such as "model.py:12:8 (mlp)": the
    innermost line that is neither jaxmem's nor an installed package's, if there is one. The path
    is relative to the working directory where it lies within. "" where JAX kept no trace.
    """
    told = source_info_util.summarize(eqn.source_info, num_frames=_FRAMES)
    frames = [line for line in reversed(told.splitlines()) if line != "unknown"]  # innermost first
    others = [f for f in frames if not f.startswith(_OURS) and "site-packages" not in f]
    place = next(iter(others or frames), "")
    return place.removeprefix(os.getcwd() + os.sep)
