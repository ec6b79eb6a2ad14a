"""The arithmetic of AdamA (Algorithm 1): decay, fold, reduce over devices, update."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem._optim.adama import ratio, rows
from jaxmem._trace.vary import axes_of, is_checked, varying
from jaxmem.errors import OptimizerError


def _known(value) -> bool:
    """Whether a setting is a number that can be checked, and not a traced one, as
    `optax.inject_hyperparams` passes them.
    """
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


SECOND_MOMENTS = ("squares", "row")


class Moments(NamedTuple):
    """What AdamA gathers of gradients, as trees like the parameters, of which they may be any part.

    mu, nu: Adam's moments.
    square: of each row the squared norm of minibatches' mean gradients, decayed as nu is.
    sketch: of each row the sum of the current minibatch's mean gradient, so far, with random signs.
      Both are None without the row ratio.
    """

    mu: Any
    nu: Any
    square: Any = None
    sketch: Any = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """The settings of one AdamA, and its arithmetic. Moments and gradients may be of the whole
    model or of any part of it.

    b1, b2, eps, eps_root, mu_dtype, nesterov: as for `optax.scale_by_adam`.
    accumulation_steps: how many microbatches make a minibatch.
    axis_name: the mesh axis over whose devices moments are reduced; None on one device.
    second_moment: one of SECOND_MOMENTS.
    learning_rate: a number or a schedule; None means that updates are not scaled.
    weight_decay: what weights decay by, times the rate; None means no decay.
    mask: which weights decay, as optax takes it; None means all.
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
    learning_rate: Any = None
    weight_decay: Any = None
    mask: Any = None

    def __post_init__(self):
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
        for name in ("b1", "b2"):
            if _known(b := getattr(self, name)) and not 0 <= b < 1:
                raise OptimizerError(
                    f"adama: `{name}` is {b!r}; expected a decay rate of at least 0 and below 1"
                )
        if self.nesterov and not self.single:
            raise OptimizerError(
                f"adama: `nesterov` with `accumulation_steps` {n}: Nesterov's update needs the"
                " minibatch's whole gradient,"
                " which AdamA never holds; use one microbatch, or"
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
        """Raises OptimizerError if a gradient does not have the moments' tree and shapes, if these
        were made by another `second_moment`, if weights decay and `params` is None, or if the
        gradient is summed over the devices already.
        """
        self.check_rows(moments)
        mu = moments.mu
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
        # Under a checked `shard_map` the gradient of parameters that are equal on all devices comes
        # out summed over them, and nu would gather the square of that sum.
        axis = self.axis_name
        if (
            axis is not None
            and is_checked(axis)
            and not all(axis in axes_of(g) for g in jax.tree.leaves(gradient))
        ):
            raise OptimizerError(
                f"adama: `updates` do not vary over {axis!r}: JAX has summed them over the devices"
                " already; expected each"
                f" device's own gradient: differentiate by jax.lax.pcast(params, {axis!r},"
                " to='varying')"
            )

    def check_rows(self, moments: Moments) -> None:
        """Raises OptimizerError for moments with rows where there are none, or without any."""
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
        """What mu and nu are multiplied by as a minibatch starts.

        With M devices nu starts as M b2 nu on each of them: `reduced` divides the sum of all by M²,
        and so leaves b2 nu (AdamA §3.3).
        """
        return self.b1, self.b2 if self.axis_name is None else self.b2 * jax.lax.axis_size(
            self.axis_name
        )

    def start(self, params) -> Moments:
        """The moments before the first minibatch."""
        moments = Moments(
            optax.tree.zeros_like(params, dtype=self.mu_dtype), optax.tree.zeros_like(params)
        )
        if self.second_moment != "row":
            return moments
        square, sketch = rows.empty(params, rows.real), rows.empty(params, rows.wide)
        return moments._replace(square=square, sketch=sketch)

    def begin(self, moments: Moments) -> Moments:
        """The moments as a minibatch starts, each device's own from here on."""
        (b1, b2), moments = self.decays, varying(moments, self.axis_name)
        mu = jax.tree.map(lambda m: b1 * m, moments.mu)
        return moments._replace(mu=mu, nu=jax.tree.map(lambda v: b2 * v, moments.nu))

    def fold(self, moments: Moments, gradient, sums: Callable) -> Moments:
        """The moments with a microbatch's mean gradient added. nu gathers the sum of the squares of
        microbatches, not the square of their sum (AdamA, Algorithm 1).

        sums: `sums(like)` makes of each row of the gradient the sum of its values with random
          signs, in a tree like the moments' sketch.
        """
        share = lambda a: a if self.single else a / self.accumulation_steps
        g = jax.tree.map(share, gradient)
        mu = jax.tree.map(lambda g, m: (1 - self.b1) * g + m, g, moments.mu)
        nu = jax.tree.map(lambda g, v: (1 - self.b2) * rows.square(g) + v, g, moments.nu)
        if moments.sketch is None:
            return Moments(mu, nu)
        # Signs in a row are random and independent, so that the square of its sum is on average the
        # sum of its squares. Unlike that sum it is of all microbatches together, as sums add up.
        added = lambda s, new: s + share(new).astype(s.dtype)
        sketch = jax.tree.map(added, moments.sketch, sums(moments.sketch))
        return Moments(mu, nu, moments.square, sketch)

    def reduced(self, moments: Moments) -> Moments:
        """The moments after a minibatch, equal on all devices of `axis_name`: the mean of mu and of
        the rows' sums, and the sum of nu divided by devices² (AdamA §3.3).
        """
        if self.axis_name is None:
            return moments
        squared = jax.lax.axis_size(self.axis_name) ** 2
        mu, sketch = jax.lax.pmean((moments.mu, moments.sketch), self.axis_name)
        nu = jax.tree.map(lambda v: v / squared, jax.lax.psum(moments.nu, self.axis_name))
        square = moments.square  # equal on all devices, which a checked type has to say too
        if is_checked(self.axis_name):
            square = jax.lax.pmax(square, self.axis_name)
        return Moments(mu, nu, square, sketch)

    def settled(
        self, moments: Moments, count, whole=None, stacked: bool | tuple[bool, ...] | None = None
    ) -> tuple[Moments, Any]:
        """The moments as the next minibatch is given them, and the second one that this minibatch's
        update divides by: nu, or with the row ratio nu times the ratio of each row.

        moments: of a minibatch's end, equal on all devices, or each device's part.
        count: how many minibatches were finished before this one.
        whole: a tree with the shapes of the whole arrays, if moments are parts, divided over the
          devices of `axis_name`.
        stacked: whether the arrays' first axis is that of layers: one word for all, or a tuple with
          one for each leaf; None where it is not known.
        """
        if moments.square is None:
            return moments, moments.nu
        devices = 1
        if whole is None and self.axis_name is not None:
            devices = jax.lax.axis_size(self.axis_name)
        nu, structure = jax.tree.flatten(moments.nu)
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

    def updates(self, mu, nu, count, params, gradient=None):
        """What is to be added to the parameters: Adam's step with bias correction and decay, times
        minus the rate.

        mu, nu: the moments at the minibatch's end.
        count: how many minibatches were finished before this one, which is what a schedule is
          given.
        params: the parameters; only weight decay reads them.
        gradient: the minibatch's, which only Nesterov's update reads.
        """
        done = optax.safe_increment(count)
        m_hat, v_hat = (
            optax.tree.bias_correction(mu, self.b1, done),
            optax.tree.bias_correction(nu, self.b2, done),
        )
        if self.nesterov:
            ahead = optax.tree.bias_correction(mu, self.b1, optax.safe_increment(done))
            g_hat = optax.tree.bias_correction(gradient, self.b1, done)
            m_hat = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, ahead, g_hat)
        u = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + self.eps_root) + self.eps), m_hat, v_hat)
        if self.weight_decay is not None:
            decay = optax.add_decayed_weights(self.weight_decay, self.mask)
            u, _ = decay.update(u, decay.init(params), params)
        if self.learning_rate is None:
            return u
        rate: Any = (
            self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate
        )
        return jax.tree.map(lambda u: jnp.asarray(-rate, u.dtype) * u, u)
