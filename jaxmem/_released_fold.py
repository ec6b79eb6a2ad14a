"""What becomes of one component's gradient, a layer's or an array's: checked, clipped, folded, let go."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._adama_rule import Rule
from jaxmem._errors import OptimizerError
from jaxmem._shards import scattered, total

CLIPS = ("value", "component", "norm")


@dataclasses.dataclass(frozen=True)
class Clip:
    """`how`: "none", or one of CLIPS; `at`: the largest value or norm that is left as it is."""

    how: str = "none"
    at: float = 0.0

    @staticmethod
    def of(clip) -> "Clip":
        if clip is None:
            return Clip()
        pair = clip if isinstance(clip, tuple) and len(clip) == 2 else (None, None)
        how, at = pair
        if how not in CLIPS or isinstance(at, bool) or not isinstance(at, int | float) or not 0 < at < float("inf"):
            raise OptimizerError(
                f"released_step: `clip` is {clip!r}; expected None or a pair of one of {', '.join(map(repr, CLIPS))} and a"
                " limit above 0: ('value', 1.0), or ('component', 1.0) for each layer's norm; ('norm', 1.0), the exact"
                " global norm, takes a second backward"
            )
        return Clip(how, float(at))

    def factor(self, square):
        """What scales a gradient of this squared norm to one of at most `at`."""
        norm = jnp.sqrt(square)
        return jnp.where(norm > self.at, self.at / jnp.where(norm == 0, 1.0, norm), 1.0)


def squared(gradient, like, axis_name: str | None):
    """A gradient's squared norm, as a float32 (or float64) scalar. `like`: of its moments, whose shards decide."""
    return total(scattered(gradient, like, axis_name), gradient, axis_name)


def folded(rule: Rule, clip: Clip, state: dict[str, Any], gradient, factor: Any = 1.0) -> dict[str, Any]:
    """`state` of one component after one microbatch: moments mu, nu; the sum of squared norms; what was skipped.

    A gradient that is not finite is left out, and counted. `factor`, of the exact global norm, scales every component.
    """
    own = scattered(gradient, state["mu"], rule.axis_name)
    square = total(own, gradient, rule.axis_name)
    finite = jnp.isfinite(square)
    scale = clip.factor(square) if clip.how == "component" else factor

    def ready(g, v):
        g = g.astype(jnp.promote_types(g.dtype, v.dtype))  # squares of a bfloat16 gradient are its moments' precision
        g = jnp.clip(g, -clip.at, clip.at) if clip.how == "value" else g
        g = g * jnp.asarray(scale, g.dtype) if clip.how in ("component", "norm") else g
        return jnp.where(finite, g, jnp.zeros((), g.dtype))

    g = jax.tree.map(ready, own, state["nu"])
    mu, nu = rule.fold(state["mu"], state["nu"], g)
    as_stored = lambda new, old: jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)
    return {
        "mu": as_stored(mu, state["mu"]),
        "nu": as_stored(nu, state["nu"]),
        "squares": state["squares"] + jnp.where(finite, square, 0.0).astype(state["squares"].dtype),
        "skipped": state["skipped"] + (1 - finite.astype(state["skipped"].dtype)),
    }
