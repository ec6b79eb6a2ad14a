"""What becomes of one component's gradient, a layer's or an array's: checked, clipped, folded, let
go.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._adama.rule import Rule
from jaxmem._states.shards import scattered, total
from jaxmem.errors import OptimizerError

CLIPS = ("value", "component", "norm")


@dataclasses.dataclass(frozen=True)
class Clip:
    """`how`: "none", or one of CLIPS; `at`: the largest value or norm that is not clipped."""

    how: str = "none"
    at: float = 0.0

    @staticmethod
    def of(clip) -> "Clip":
        if clip is None:
            return Clip()
        pair = clip if isinstance(clip, tuple) and len(clip) == 2 else (None, None)
        how, at = pair
        if (
            how not in CLIPS
            or isinstance(at, bool)
            or not isinstance(at, int | float)
            or not 0 < at < float("inf")
        ):
            raise OptimizerError(
                f"released_step: `clip` is {clip!r}; expected None or a pair of one of"
                f" {', '.join(map(repr, CLIPS))} and a"
                " limit above 0: ('value', 1.0), or ('component', 1.0) for each layer's norm;"
                " ('norm', 1.0), the exact"
                " global norm, takes a second backward"
            )
        return Clip(how, float(at))

    def factor(self, square):
        """What scales a gradient of this squared norm to one of at most `at`."""
        norm = jnp.sqrt(square)
        return jnp.where(norm > self.at, self.at / jnp.where(norm == 0, 1.0, norm), 1.0)


def squared(gradient, like, axis_name: str | None):
    """A gradient's squared norm, as a float32 (or float64) scalar. `like`: of its moments, whose
    shards decide.
    """
    return total(scattered(gradient, like, axis_name), gradient, axis_name)


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """`fold(state, gradient)`: the state of one component after one microbatch, whose moments decay
    by `decays` before.

    `state`: moments mu, nu; the sum of squared norms; what was skipped. A gradient that is not
    finite is left out, and counted. `factor`, of the exact global norm, scales every component.
    """

    rule: Rule
    clip: Clip
    decays: tuple[Any, Any]
    factor: Any = 1.0

    def __call__(self, state: dict[str, Any], gradient) -> dict[str, Any]:
        own = scattered(gradient, state["mu"], self.rule.axis_name)
        square = total(own, gradient, self.rule.axis_name)
        finite = jnp.isfinite(square)
        g = jax.tree.map(lambda g, v: self._ready(g, v, square, finite), own, state["nu"])
        started = lambda name, by: jax.tree.map(lambda a: a * by.astype(a.dtype), state[name])
        mu, nu = self.rule.fold(started("mu", self.decays[0]), started("nu", self.decays[1]), g)
        as_stored = lambda new, name: jax.tree.map(lambda a, b: a.astype(b.dtype), new, state[name])
        counted = state["skipped"] + (1 - finite.astype(state["skipped"].dtype))
        squares = state["squares"] + jnp.where(finite, square, 0.0).astype(state["squares"].dtype)
        return {
            "mu": as_stored(mu, "mu"),
            "nu": as_stored(nu, "nu"),
            "squares": squares,
            "skipped": counted,
        }

    def _ready(self, g, v, square, finite):
        """One array's gradient as it is folded."""
        clip = self.clip
        # squares of a bfloat16 gradient are its moments' precision
        g = g.astype(jnp.promote_types(g.dtype, v.dtype))
        g = jnp.clip(g, -clip.at, clip.at) if clip.how == "value" else g
        if clip.how in ("component", "norm"):
            scale = clip.factor(square) if clip.how == "component" else self.factor
            g = g * jnp.asarray(scale, g.dtype)
        return jnp.where(finite, g, jnp.zeros((), g.dtype))
