"""The arithmetic of AdamA (Algorithm 1): decay, fold, reduce over devices, update."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem._core.assignment import MOMENTS
from jaxmem._model.tags.operations import wide
from jaxmem._optim.adama import ratio, rows
from jaxmem._optim.adama.eight_bits import coded, decoded, recoded, scaled, shapes
from jaxmem._trace.vary import axes_of, is_checked, varying
from jaxmem.errors import OptimizerError


def _known(value) -> bool:
    """Whether a setting is a number that can be checked, and not a traced one, as
    `optax.inject_hyperparams` passes them.
    """
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def unscaled(count):
    """The schedule of a transformation without a learning rate: updates are not scaled."""
    return -1.0


SECOND_MOMENTS = ("squares", "row")


def whole_mask(mask, shapes, called: Callable[[Callable], Any]) -> Any:
    """Returns the leaf of a mask for each leaf of `shapes`. A leaf of the mask may stand for a
    branch, and the mask may be a function of the tree.

    called: returns what the function returns.
    """
    # A module of Equinox is a tree that can be called. A class is no function of the tree.
    if callable(mask) and jax.tree_util.all_leaves([mask]) and not isinstance(mask, type):
        mask = called(mask)
    of_branch = lambda flag, branch: jax.tree.map(lambda _: flag, branch)
    return jax.tree.map(of_branch, mask, shapes)


class Moments(NamedTuple):
    """The arrays into which AdamA folds gradients: trees like the parameters, or like any part of
    the parameters.

    mu, nu: Adam's moments.
    square: the decayed average of the squared signed sums of each row; None without the row ratio.
    sketch: the signed sum of each row of the current minibatch's mean gradient, so far; None
      without the row ratio.
    """

    mu: Any
    nu: Any
    square: Any = None
    sketch: Any = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """The settings of one AdamA, and its arithmetic. Moments and gradients may belong to the whole
    model, or to any part of the model.

    b1, b2, eps, eps_root, mu_dtype, nesterov: as for `optax.scale_by_adam`.
    accumulation_steps: number of microbatches in a minibatch.
    axis_name: the mesh axis over whose devices moments are reduced; None on one device.
    second_moment: one of SECOND_MOMENTS.
    learning_rate: a number or a schedule; `unscaled` means that updates are not scaled.
    weight_decay: the rate of weight decay, relative to the learning rate; None means no decay.
    mask: the weights that decay, as for `optax.adamw`; None means all weights.
    moments: one of MOMENTS: how mu and nu are stored.
    """

    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    mu_dtype: Any
    nesterov: bool
    accumulation_steps: Any
    axis_name: str | None
    second_moment: str = "squares"
    learning_rate: Any = unscaled
    weight_decay: Any = None
    mask: Any = None
    moments: str = "float"

    def __post_init__(self):
        if self.moments not in MOMENTS:
            raise OptimizerError(
                f"adama: `moments` is {self.moments!r}; expected 'float', the dtypes of the"
                " parameters, or 'int8', 8 bits a value"
            )
        if self.moments == "int8" and self.mu_dtype is not None:
            raise OptimizerError(
                f"adama: `mu_dtype` is {self.mu_dtype!r} and `moments` is 'int8'; expected one of"
                " them"
            )
        if self.second_moment not in SECOND_MOMENTS:
            raise OptimizerError(
                f"adama: `second_moment` is {self.second_moment!r}; expected 'squares', the sum of"
                " microbatches' squared gradients (AdamA), or 'row', which scales it by a ratio a"
                " row towards Adam's"
            )
        n = self.accumulation_steps
        if not isinstance(n, jax.Array):
            if not _known(n) or n != int(n) or n < 1:
                raise OptimizerError(
                    f"adama: `accumulation_steps` is {n!r}; expected a whole number of at least 1"
                )
            object.__setattr__(self, "accumulation_steps", int(n))
        limits = {"b1": (0, 1), "b2": (0, 1), "eps": (0, math.inf), "eps_root": (0, math.inf)}
        for name, (low, high) in (limits | {"learning_rate": (-math.inf, math.inf)}).items():
            a: Any = getattr(self, name)
            # An array may be traced, and a function is a schedule.
            within = _known(a) and low <= a < high and a > -math.inf
            if not within and (_known(a) or not (hasattr(a, "dtype") or callable(a))):
                raise OptimizerError(
                    f"adama: `{name}` is {a!r}; expected a finite number, at least {low} and below"
                    f" {high}; a learning rate may be a schedule"
                )
        if self.nesterov and not self.single:
            raise OptimizerError(
                f"adama: `nesterov` with `accumulation_steps` {n}: Nesterov's update needs the"
                " minibatch's whole gradient, which AdamA never holds; use one microbatch, or"
                " optax.MultiSteps(optax.nadam(...))"
            )
        object.__setattr__(
            self, "mu_dtype", None if self.mu_dtype is None else jnp.dtype(self.mu_dtype)
        )

    @property
    def single(self) -> bool:
        """Whether one microbatch is a whole minibatch, which makes this Adam itself."""
        return isinstance(self.accumulation_steps, int) and self.accumulation_steps == 1

    def check(self, gradient, moments: Moments, params) -> None:
        """Raises OptimizerError if the gradient does not have the tree and the shapes of the
        moments, if another `second_moment` made the moments, if weights decay and `params` is None,
        or if the gradient is already summed over the devices.
        """
        self.check_rows(moments)
        mu = moments.mu
        mu = shapes(mu)
        if jax.tree.structure(gradient) != jax.tree.structure(mu):
            raise OptimizerError(
                f"adama: `updates` is {jax.tree.structure(gradient)}, and the state was made for"
                f" {jax.tree.structure(mu)};"
                " expected the gradient of the parameters that `init` was given"
            )
        for (path, g), m in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(mu)):
            if jnp.shape(g) != jnp.shape(m):
                raise OptimizerError(
                    f"adama: `updates{jax.tree_util.keystr(path)}` has shape {jnp.shape(g)}, and"
                    " its moments"
                    f" {jnp.shape(m)}; parameters that change shape need a new state: `init` again"
                )
        if self.weight_decay is not None and params is None:
            raise OptimizerError(
                "adamaw_a: `params` is None; expected the parameters, since they decay:"
                " update(updates, state, params)"
            )
        # Under a checked `shard_map`, JAX sums the gradient of parameters that are equal on all
        # devices over the devices, and nu would accumulate the square of the sum.
        axis = self.axis_name
        if (
            axis is not None
            and is_checked(axis)
            and not all(axis in axes_of(g) for g in jax.tree.leaves(gradient))
        ):
            raise OptimizerError(
                f"adama: `updates` do not vary over {axis!r}: JAX has summed them over the devices"
                " already; expected each device's own gradient: differentiate by"
                f" jax.lax.pcast(params, {axis!r}, to='varying')"
            )

    def check_rows(self, moments: Moments) -> None:
        """Raises OptimizerError if the moments have rows and `second_moment` is not "row", or if
        they have no rows and it is.
        """
        if (moments.square is None) == (self.second_moment != "row"):
            return
        has = "no rows, as" if moments.square is None else "rows, unlike"
        raise OptimizerError(
            f"adama: `second_moment` is {self.second_moment!r}, and the state has {has} that of"
            " 'squares'; expected what this transformation's `init` made, whose count, mu and nu"
            " may be another state's"
        )

    @property
    def decays(self) -> tuple[Any, Any]:
        """The factors of mu and nu at the start of a minibatch.

        With M devices, nu starts as M·b2·nu on each device. `reduced` divides the sum over devices
        by M², which is b2·nu (AdamA §3.3).
        """
        return self.b1, self.b2 if self.axis_name is None else self.b2 * jax.lax.axis_size(
            self.axis_name
        )

    def start(self, params) -> Moments:
        """Returns the moments before the first minibatch."""
        moments = Moments(
            optax.tree.zeros_like(params, dtype=self.mu_dtype), optax.tree.zeros_like(params)
        )
        if self.moments == "int8":
            moments = Moments(coded(moments.mu, signed=True), coded(moments.nu, signed=False))
        if self.second_moment != "row":
            return moments
        square, sketch = rows.empty(params, rows.real), rows.empty(params, wide)
        return moments._replace(square=square, sketch=sketch)

    def begin(self, moments: Moments) -> Moments:
        """Returns the moments at the start of a minibatch. They differ from device to device from
        then on.
        """
        (b1, b2), moments = self.decays, varying(moments, self.axis_name)
        return moments._replace(mu=scaled(moments.mu, b1), nu=scaled(moments.nu, b2))

    def fold(self, moments: Moments, gradient, sums: Callable, number) -> Moments:
        """Folds a microbatch's mean gradient into the moments, and returns the moments. nu
        accumulates the sum of the microbatches' squares, not the square of their sum (AdamA,
        Algorithm 1).

        sums: `sums(like)` returns the signed sum of each row of the gradient, in a tree like the
          moments' sketch.
        number: the number of the microbatch over all minibatches, int32, from which the random bits
          of moments in 8 bits are made.
        """
        share = lambda a: a if self.single else a / self.accumulation_steps
        g = jax.tree.map(share, gradient)
        mu = jax.tree.map(lambda g, m: (1 - self.b1) * g + m, g, decoded(moments.mu))
        nu = jax.tree.map(lambda g, v: (1 - self.b2) * rows.square(g) + v, g, decoded(moments.nu))
        mu, nu = recoded((moments.mu, moments.nu), (mu, nu), number)
        if moments.sketch is None:
            return Moments(mu, nu)
        # The signs in a row are random and independent, so that the expectation of the squared
        # signed sum is the sum of the row's squares. Signed sums add up over microbatches, so the
        # expectation belongs to the gradient of all microbatches together.
        added = lambda s, new: s + share(new).astype(s.dtype)
        sketch = jax.tree.map(added, moments.sketch, sums(moments.sketch))
        return Moments(mu, nu, moments.square, sketch)

    def reduced(self, moments: Moments, count) -> Moments:
        """Returns the moments after a minibatch, equal on all devices of `axis_name`: the mean of
        mu and of the rows' sums, and the sum of nu divided by devices² (AdamA §3.3).
        """
        if self.axis_name is None:
            return moments
        squared = jax.lax.axis_size(self.axis_name) ** 2
        own = decoded(moments)
        mu, sketch = jax.lax.pmean((own.mu, own.sketch), self.axis_name)
        nu = jax.tree.map(lambda v: v / squared, jax.lax.psum(own.nu, self.axis_name))
        # The random bits are equal on all devices.
        mu, nu = recoded((moments.mu, moments.nu), (mu, nu), -1 - count)
        square = moments.square  # equal on all devices; `pmax` makes a checked type say so
        if is_checked(self.axis_name):
            square = jax.lax.pmax(square, self.axis_name)
        return Moments(mu, nu, square, sketch)

    def settled(
        self, moments: Moments, count, whole=None, stacked: bool | tuple[bool, ...] | None = None
    ) -> tuple[Moments, Any]:
        """Returns the moments for the next minibatch, and the second moment of this minibatch's
        update: nu, or with the row ratio nu times the ratio of each row.

        moments: the moments at the minibatch's end, equal on all devices, or each device's parts.
        count: number of minibatches that were finished before this one.
        whole: a tree with the shapes of the whole arrays, if moments are parts, divided over the
          devices of `axis_name`.
        stacked: whether the arrays' first axis is the axis of layers: one boolean for all arrays,
          or a tuple with a boolean for each leaf. None means that this is unknown.
        """
        if moments.square is None:
            return moments, decoded(moments.nu)
        devices = 1
        if whole is None and self.axis_name is not None:
            devices = jax.lax.axis_size(self.axis_name)
        nu, structure = jax.tree.flatten(decoded(moments.nu))
        sketch = jax.tree.leaves(moments.sketch)
        square, scaled = ratio.scaled(
            nu,
            jax.tree.leaves(moments.square),
            sketch,
            b2=self.b2,
            done=optax.safe_increment(count),
            most=self.accumulation_steps * devices,
            like=nu if whole is None else jax.tree.leaves(whole),
            axis_name=None if whole is None else self.axis_name,
            stacked=list(stacked) if isinstance(stacked, tuple) else [stacked] * len(nu),
        )
        if self.single and devices == 1:
            scaled = nu
        square, empty, nu = (
            structure.unflatten(leaves)
            for leaves in (square, [*map(jnp.zeros_like, sketch)], scaled)
        )
        return moments._replace(square=square, sketch=empty), nu

    def applied(self, params, moments: Moments, count, whole=None, stacked=None):
        """Returns the parameters and the moments after a minibatch. `settled` and `updates`
        document the arguments.
        """
        moments, nu = self.settled(moments, count, whole, stacked)
        return optax.apply_updates(params, self.updates(moments.mu, nu, count, params)), moments

    def mask_of(self, shapes) -> Any:
        """Returns the mask of weight decay for parameters of these shapes: a boolean for each
        array, or None. The function of a mask receives traced arrays.
        """
        box: list = []

        def called(function: Callable):
            jax.eval_shape(lambda params: box.append(function(params)), shapes)
            return box[-1]

        return None if self.mask is None else whole_mask(self.mask, shapes, called)

    def updates(self, mu, nu, count, params, gradient=None):
        """Returns the updates to add to the parameters: Adam's step with bias correction and decay,
        times minus the rate.

        mu, nu: the moments at the minibatch's end.
        count: number of minibatches that were finished before this one; a schedule receives it.
        params: the parameters; only weight decay reads them.
        gradient: the minibatch's gradient; only Nesterov's update reads it.
        """
        mu, done = decoded(mu), optax.safe_increment(count)
        corrected = optax.tree.bias_correction
        m_hat, v_hat = corrected(mu, self.b1, done), corrected(nu, self.b2, done)
        if self.nesterov:
            ahead = corrected(mu, self.b1, optax.safe_increment(done))
            g_hat = corrected(gradient, self.b1, done)
            m_hat = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, ahead, g_hat)
        u = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + self.eps_root) + self.eps), m_hat, v_hat)
        if self.weight_decay is not None:
            decay = optax.add_decayed_weights(self.weight_decay, self.mask)
            u, _ = decay.update(u, decay.init(params), params)
        if self.learning_rate is unscaled:
            return u
        rate: Any = self.learning_rate
        rate = rate(count) if callable(rate) else rate
        return jax.tree.map(lambda u: jnp.asarray(-rate, u.dtype) * u, u)
