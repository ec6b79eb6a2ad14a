"""What becomes of one component's gradient: it is checked, clipped and folded into its moments.

A component is what is folded at once: one layer, or one array outside the layers.
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
    """How gradients are clipped.

    how: "none", or one of CLIPS.
    at: the largest value or norm that is not clipped.
    """

    how: str = "none"
    at: float = 0.0

    @staticmethod
    def of(clip) -> "Clip":
        """Reads the argument `clip` of `released_step`. Raises OptimizerError for anything else."""
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
        """What scales a gradient of this squared norm to a norm of at most `at`."""
        norm = jnp.sqrt(square)
        # both branches are computed: 1.0 keeps a zero norm from dividing
        return jnp.where(norm > self.at, self.at / jnp.where(norm == 0, 1.0, norm), 1.0)


def squared(gradient, like, axis_name: str | None):
    """A gradient's squared norm, as a float32 (or float64) scalar.

    gradient: a tree of whole arrays, this device's own.
    like: the same tree with the shapes of its moments, which may be a device's part.
    axis_name: the mesh axis over which the gradient is averaged first; None is this device's own.
    """
    return total(scattered(gradient, like, axis_name), gradient, axis_name)


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """`fold(state, gradient)` returns the state of one component after one microbatch.

    The state is a dict: the moments "mu" and "nu"; "squares", the sum of the squared norms of its
    gradients; "skipped", how many of them were left out since they were not finite.

    rule: the arithmetic of AdamA.
    clip: how the gradient is clipped.
    decays: what mu and nu are multiplied by first: the minibatch's decay rates in its first
      microbatch, 1 in the others.
    factor: what scales every component, where `clip` is by the exact global norm.
    mean_over: the mesh axis over whose devices every gradient is averaged before it is folded, for
      moments that are divided over them; None: each device folds its own gradient, and moments are
      reduced at the end of the minibatch.
    """

    rule: Rule
    clip: Clip
    decays: tuple[Any, Any]
    factor: Any = 1.0
    mean_over: str | None = None

    def __call__(self, state: dict[str, Any], gradient) -> dict[str, Any]:
        # Where moments are divided, `own` is this device's part of the mean gradient, or all of it
        # for an array that no dimension divides; else it is the device's gradient. The square is of
        # all parts together, so that all devices decide alike.
        own = scattered(gradient, state["mu"], self.mean_over)
        square = total(own, gradient, self.mean_over)
        finite = jnp.isfinite(square)
        # One value that is not finite leaves out the component's gradient; its moments still decay.
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
        """One array's gradient in the form in which it is folded: widened, clipped, and zero where
        the component's gradient is not finite.
        """
        clip = self.clip
        # widened first: a bfloat16 gradient is squared in the precision of its moments
        g = g.astype(jnp.promote_types(g.dtype, v.dtype))
        g = jnp.clip(g, -clip.at, clip.at) if clip.how == "value" else g
        if clip.how in ("component", "norm"):
            scale = clip.factor(square) if clip.how == "component" else self.factor
            g = g * jnp.asarray(scale, g.dtype)
        return jnp.where(finite, g, jnp.zeros((), g.dtype))
