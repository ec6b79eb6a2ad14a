"""Checks, clips and uses the gradient of one component. AdamA uses a gradient by folding it into
moments.

A component is a part of the parameters that is updated at once: one layer, or one array outside the
layers.

A component's gradient has one of two uses, `Accumulation` or `Update` (`direct.py`). The backward
does not distinguish them: it passes a state and a gradient to the use, and puts the new state in
the place of the old one. If the state has an entry "params", the loop reads the parameters from
that entry, since the parameters are replaced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxmem._model.states.shards import scattered, total
from jaxmem._optim.adama.eight_bits import is_coded, scaled, shapes
from jaxmem._optim.adama.rows import Position
from jaxmem._optim.adama.rule import Moments, Rule
from jaxmem.errors import OptimizerError

CLIPS = ("value", "component", "norm")
TALLIES = ("squares", "skipped")


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
                f" {', '.join(map(repr, CLIPS))} and a limit above 0: ('value', 1.0), or"
                " ('component', 1.0) for each layer's norm; ('norm', 1.0), the exact global norm,"
                " takes a second backward"
            )
        return Clip(how, float(at))

    def factor(self, square):
        """Returns the factor that scales a gradient of this squared norm to a norm of at most
        `at`.
        """
        norm = jnp.sqrt(square)
        # both branches are computed: 1.0 keeps a zero norm from dividing
        return jnp.where(norm > self.at, self.at / jnp.where(norm == 0, 1.0, norm), 1.0)


def squared(gradient, like, axis_name: str | None):
    """Returns a gradient's squared norm, a float32 (or float64) scalar.

    gradient: this device's gradient, a tree of whole arrays.
    like: a tree of the same structure with the shapes of the moments, which may be a device's
      parts.
    axis_name: the mesh axis over which the gradient is averaged first; None means no average.
    """
    return total(scattered(gradient, like, axis_name), gradient, axis_name)


class Gradient(NamedTuple):
    """A component's gradient that is ready for its use.

    arrays: a tree of clipped arrays, at least as wide as the moments; zeros if `finite` is false.
    finite: whether all values of the gradient are finite, a scalar.
    clipped: a tree of the same structure, clipped by value only, in the dtypes of the gradient.
    scale: the factor that clips the gradient by its norm, a scalar; None means no factor.
    whole: a tree with the shapes of the component's whole arrays.
    """

    arrays: Any
    finite: Any
    clipped: Any
    scale: Any
    whole: Any

    def sums(self, position: Position, like):
        """Returns the sum of each row of `arrays` with random signs, in a tree of `like`'s shapes.

        The sums are made of `clipped`, and then scaled: a sum of values that are computed while
        they are read takes three times as long on a CPU. In half precision the sums are made of
        `arrays`, since folded values are rounded.
        """

        def ready(sums):
            scaled = sums if self.scale is None else sums * jnp.asarray(self.scale, sums.dtype)
            return jnp.where(self.finite, scaled, jnp.zeros((), sums.dtype))

        half = [jnp.finfo(a.dtype).bits < 32 for a in jax.tree.leaves(self.arrays)]
        if any(half):
            return position.sums(self.arrays, like)
        return jax.tree.map(ready, position.sums(self.clipped, like))


class Use(Protocol):
    """The use of a component's gradient: a fold into moments, or an update."""

    def like(self, state: dict[str, Any]):
        """Returns the arrays of the component's state to which the gradient is added. The gradient
        is widened to their dtypes, and scattered to their shapes if a device has parts of them.
        """
        ...

    def __call__(self, state: dict[str, Any], gradient: Gradient) -> dict[str, Any]:
        """Returns the component's new state, with the entries of the old state."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """`fold(state, gradient)` returns the state of one component after one microbatch.

    The state is a dict with the entries that `use` reads and replaces, and two tallies: "squares",
    the sum of the squared norms of the component's gradients, and "skipped", the number of
    gradients that were not used because they were not finite. If there is an entry "params", it has
    the component's parameters, which are then replaced too.

    use: the use of the gradient.
    clip: how the gradient is clipped.
    factor: the factor that scales every component's gradient if `clip` is by the exact global norm.
    mean_over: the mesh axis over whose devices every gradient is averaged before its use. None:
      each device uses its own gradient.
    """

    use: Use
    clip: Clip
    factor: Any = 1.0
    mean_over: str | None = None

    def __call__(self, state: dict[str, Any], gradient) -> dict[str, Any]:
        # If states are divided, `own` is this device's part of the mean gradient, or the whole mean
        # gradient of an undivided array. Otherwise `own` is the device's gradient. The square is
        # summed over all parts, so that all devices decide alike.
        like = self.use.like(state)
        own = scattered(gradient, like, self.mean_over)
        square = total(own, gradient, self.mean_over)
        # A component's gradient is not used if one of its values is not finite.
        finite = jnp.isfinite(square)
        held = {k: v for k, v in state.items() if k not in TALLIES}
        used = self.use(held, self._clipped(own, like, square, finite, gradient))
        counted = state["skipped"] + (1 - finite.astype(state["skipped"].dtype))
        squares = state["squares"] + jnp.where(finite, square, 0.0).astype(state["squares"].dtype)
        return used | {"squares": squares, "skipped": counted}

    def _clipped(self, own, like, square, finite, whole) -> Gradient:
        """Returns the clipped gradient, as zeros if it is not finite."""
        clip = self.clip
        # Widened first: a bfloat16 gradient is clipped and squared in the precision of its moments.
        wide = lambda g, v: g.astype(jnp.promote_types(g.dtype, v.dtype))
        bounded = lambda g, v: jnp.clip(wide(g, v), -clip.at, clip.at)
        clipped = jax.tree.map(bounded, own, like) if clip.how == "value" else own
        by_norm = {"component": lambda: clip.factor(square), "norm": lambda: self.factor}
        scale = by_norm[clip.how]() if clip.how in by_norm else None

        def ready(g, v):
            g = wide(g, v)
            g = g if scale is None else g * jnp.asarray(scale, g.dtype)
            return jnp.where(finite, g, jnp.zeros((), g.dtype))

        return Gradient(jax.tree.map(ready, clipped, like), finite, clipped, scale, whole)


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation:
    """Folds a gradient into the moments of a component's state. The moments decay first, even if
    the gradient is not finite.

    rule: the arithmetic of AdamA.
    step: number of minibatches that were finished before this one.
    decays: the factors of mu and nu: the minibatch's decay rates in its first microbatch, and 1 in
      the others.
    update: `update(parameters, moments, whole)` makes the component's new parameters and moments
      from the moments after the minibatch's last microbatch; `whole` is `Gradient.whole`. None
      leaves the parameters unchanged.
    divided_over: the mesh axis over whose devices moments are divided. None: each device has whole
      moments.
    stacked: as for `Position`.
    number: the number of the microbatch in its minibatch, over all devices.
    """

    rule: Rule
    step: Any
    decays: tuple[Any, Any]
    update: Callable | None = None
    divided_over: str | None = None
    stacked: bool = False
    number: Any = 0

    def like(self, state):
        return shapes(state["nu"])

    def __call__(self, state, gradient):
        old = Moments(**{k: state[k] for k in Moments._fields if k in state})

        # The factor is always `by`, since a gradient that is not finite was replaced by zeros. It
        # is an array, since XLA would multiply a layer by a number in a pass of its own.
        def decayed(tree, by):
            def one(a, g):
                return (
                    scaled(a, by) if is_coded(a) else a * jnp.where(g == g, by, 1).astype(a.dtype)
                )

            return jax.tree.map(one, tree, gradient.arrays, is_leaf=is_coded)

        mu, nu = map(decayed, (old.mu, old.nu), self.decays)
        position = Position(self.step, gradient.whole, self.divided_over, self.stacked)
        sums = functools.partial(gradient.sums, position)
        number = self.step * self.rule.accumulation_steps + self.number
        new = self.rule.fold(old._replace(mu=mu, nu=nu), gradient.arrays, sums, number)
        new = jax.tree.map(lambda a, b: a.astype(b.dtype), new, old)
        if self.update is None:
            return entries(new)
        params, new = self.update(state["params"], new, gradient.whole)
        return entries(new) | {"params": params}


def entries(moments: Moments) -> dict[str, Any]:
    """Returns the entries of moments in a component's state, by name."""
    return {k: v for k, v in moments._asdict().items() if v is not None}
