"""AdamA as an optax transformation: each microbatch's gradient is folded into Adam's moments.

No buffer accumulates gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem._core.assignment import INT8
from jaxmem._optim.adama.rows import Position
from jaxmem._optim.adama.rule import Moments, Rule
from jaxmem._trace.vary import varying, zeros
from jaxmem.errors import OptimizerError


class AdamAState(NamedTuple):
    """The state of AdamA between two microbatches.

    count: number of finished minibatches, int32.
    folded: number of microbatches of the current minibatch that are folded, int32.
    mu, nu: Adam's first and second moment, trees like the parameters.
    """

    count: Any
    folded: Any
    mu: Any
    nu: Any

    @property
    def moments(self) -> Moments:
        """The moments into which gradients are folded."""
        return Moments(self.mu, self.nu)


class RowState(NamedTuple):
    """The state of AdamA with `second_moment="row"`.

    count: number of finished minibatches, int32.
    folded: number of microbatches of the current minibatch that are folded, int32.
    mu, nu: Adam's first and second moment, trees like the parameters.
    square: a tree like the parameters with one number per row, float32 or wider: the decayed
      average of the squared signed sums.
    sketch: a tree like the parameters with one number per row, float32 or wider: the signed sum of
      the current minibatch's gradient.
    """

    count: Any
    folded: Any
    mu: Any
    nu: Any
    square: Any
    sketch: Any

    @property
    def moments(self) -> Moments:
        """The moments, and the numbers of the rows, into which gradients are folded."""
        return Moments(*self[2:])


State = AdamAState | RowState


def with_moments(state: State, moments: Moments) -> Any:
    """Returns the state with these moments in place of its own moments."""
    return state._replace(**{k: v for k, v in moments._asdict().items() if k in state._fields})


class AdamA(optax.GradientTransformationExtraArgs):
    """An optax transformation with separate operations: `begin`, `fold` and `finish`.

    A user's own training loop may call the operations.

    A minibatch is one call of `begin`, one call of `fold` for each of its `accumulation_steps`
    microbatches, and one call of `finish` (AdamA, Algorithm 1). `begin` and `fold` accept the state
    of the whole model, or of any part of the model, such as one layer.
    """

    rule: Rule

    @staticmethod
    def of(rule: Rule) -> "AdamA":
        """Makes the transformation that follows `rule`.

        A released step reads the rule from the transformation.
        """
        update: Any = functools.partial(_update, rule)
        made = AdamA(functools.partial(_init, rule), update)
        made.rule = rule
        return made

    def quantized(self) -> "AdamA":
        """Returns the transformation with its moments in 8 bits, as `moments="int8"` does.

        Raises OptimizerError if the first moment has a dtype of its own, `mu_dtype`.
        """
        return AdamA.of(dataclasses.replace(self.rule, moments=INT8))

    def begin(self, state: State) -> Any:
        """Begins a minibatch: returns the state with decayed moments.

        The moments become b1·mu and b2·nu. With `axis_name`, nu becomes M·b2·nu for M devices
        (AdamA §3.3).
        """
        self.rule.check_rows(state.moments)
        return with_moments(state, self.rule.begin(state.moments))

    def fold(self, state: State, gradient) -> Any:
        """Folds a microbatch's gradient into the moments, and returns the new state.

        The moments become mu + (1 − b1)·g and nu + (1 − b2)·g², where g is `gradient` divided by
        `accumulation_steps` (AdamA, Algorithm 1). With `second_moment="row"`, the signed sum of
        each row of g is added too.

        state: the state after `begin`, or after the fold of the microbatch before.
        gradient: the microbatch's mean gradient, a tree like `state.mu`.
        """
        self.rule.check_rows(state.moments)
        sums = functools.partial(Position(state.count).sums, gradient)
        number = _number(self.rule, state)
        folded = self.rule.fold(state.moments, gradient, sums, number)
        return with_moments(state._replace(folded=state.folded + 1), folded)

    def finish(
        self, state: State, params=None, stacked: tuple[bool, ...] | None = None
    ) -> tuple[Any, Any]:
        """Ends a minibatch: returns the updates, and the state for the next minibatch.

        With `axis_name`, the moments are all-reduced over the devices first.

        state: the state after the last fold of the minibatch.
        params: the parameters, which only weight decay reads.
        stacked: for each array of the state, whether its first axis is the axis of layers. The row
          ratios of different layers are then not mixed. None means that the axes of layers are
          unknown.

        Raises OptimizerError with `nesterov`, because the update needs the minibatch's gradient:
        call `update` instead.
        """
        if self.rule.nesterov:
            raise OptimizerError(
                "finish: `nesterov` needs the minibatch's gradient; expected `update` to be called"
                " instead"
            )
        self.rule.check_rows(state.moments)
        return _finish(self.rule, state, params, stacked=stacked)


def _init(rule: Rule, params) -> State:
    """Returns the optimizer's first state, with counters at zero."""
    # Each counter is an array of its own: donating a state that holds one buffer twice is an error.
    zero = lambda: jnp.zeros((), jnp.int32)
    moments = rule.start(params)
    if moments.square is None:
        return AdamAState(zero(), zero(), moments.mu, moments.nu)
    return RowState(zero(), zero(), *moments)


def _number(rule: Rule, state: State):
    """The number of the current microbatch over all minibatches."""
    return state.count * rule.accumulation_steps + state.folded


def _finish(
    rule: Rule, state: State, params, gradient=None, stacked: tuple[bool, ...] | None = None
) -> tuple[Any, Any]:
    """Ends a minibatch: reduces the moments over devices, and makes the updates from the moments.

    stacked: for each array, whether its first axis is the axis of layers; None means unknown.
    """
    moments, nu = rule.settled(
        rule.reduced(state.moments, state.count), state.count, stacked=stacked
    )
    updates = rule.updates(moments.mu, nu, state.count, params, gradient)
    counted = state._replace(
        count=optax.safe_increment(state.count), folded=jnp.zeros_like(state.folded)
    )
    return updates, with_moments(counted, moments)


def _update(rule: Rule, updates, state: State, params=None, **_):
    """`update` of the transformation: a fold, and the minibatch's update after its last one."""
    rule.check(updates, state.moments, params)
    # Only a minibatch's first microbatch begins with decayed moments. The number of folded
    # microbatches is known when the step runs, not when it is traced.
    begun = rule.begin(state.moments)
    if not rule.single:
        now = varying(state.moments, rule.axis_name)
        begun = jax.tree.map(lambda new, old: jnp.where(state.folded == 0, new, old), begun, now)
    sums = functools.partial(Position(state.count).sums, updates)
    moments = rule.fold(begun, updates, sums, _number(rule, state))
    folded = with_moments(state._replace(folded=state.folded + 1), moments)
    looks_ahead = rule.axis_name is not None and rule.nesterov
    whole = jax.lax.pmean(updates, rule.axis_name) if looks_ahead else updates

    def finish():
        new, finished = _finish(rule, folded, params, whole)
        return new, _stored(rule, finished, state)

    if rule.single:
        return finish()
    # Before the last microbatch the updates are zeros of the shapes and dtypes that `finish`
    # returns.
    updates_like, _ = jax.eval_shape(finish)
    nothing = zeros(updates_like)
    last = folded.folded == rule.accumulation_steps
    return jax.lax.cond(last, finish, lambda: (nothing, _stored(rule, folded, state)))


def _stored(rule: Rule, new: State, old: State) -> Any:
    """Returns the new state with the types of the old state, so that both branches of the `cond`
    agree: the old dtypes, and moments whose types vary over devices. The reduced moments are equal
    on all devices, but the other branch's moments are not.
    """
    as_stored = lambda a, b: a.astype(b.dtype)
    moments = varying(jax.tree.map(as_stored, new.moments, old.moments), rule.axis_name)
    return with_moments(new, moments)


def scale_by_adama(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    accumulation_steps: int = 1,
    axis_name: str | None = None,
    second_moment: Literal["squares", "row"] = "squares",
    moments: Literal["float", "int8"] = "float",
) -> AdamA:
    """Makes an optax transformation: `optax.scale_by_adam` with several microbatches per update.

    `accumulation_steps` microbatches are a minibatch. Each microbatch's gradient is folded into the
    moments, so that no buffer accumulates gradients (AdamA, Algorithm 1).

    b1, b2: decay rates of the first and the second moment, in [0, 1).
    eps, eps_root: constants that are added outside and under the square root, as in optax.
    mu_dtype: dtype of the first moment. None means the parameter's dtype.
    nesterov: whether to use Nesterov momentum. Nesterov's update needs the whole gradient, so it
      works with one microbatch only.
    accumulation_steps: number of microbatches in a minibatch, at least 1.
    axis_name: a mesh axis of `jax.shard_map`, for data parallelism. Each device folds its own
      gradients into its own moments. After the minibatch's last microbatch, the moments are reduced
      once over the devices (AdamA §3.3). None means one device.
    second_moment: the rule for the second moment. "squares" is the paper's rule: nu accumulates the
      squares of the microbatches' gradients, not the square of their sum. If the gradients of N
      microbatches agree, nu is up to N times smaller than Adam's nu. "row" multiplies nu by one
      ratio per row, between 1 and N (N·M over M devices). The ratio estimates Adam's nu divided by
      AdamA's nu, both summed over the row. The estimate needs no gradient buffer: the values of a
      row are summed with random signs. The signed sum adds up over microbatches, and the
      expectation of its square is the squared norm of the row's mean gradient. "row" stores 8 bytes
      per row. A row runs along an array's last axis. A short row extends over the preceding axes.
    moments: how mu and nu are stored. "float" stores them in the dtypes of the parameters. "int8"
      stores one byte a value and a float32 scale for each row of the last axis, with stochastic,
      unbiased rounding after each fold (`jaxmem.quantized` documents the error). Devices cannot
      divide such moments (ZeRO).

    `update` takes each microbatch's mean gradient, and returns zeros before the minibatch's last
    microbatch. With one microbatch, the rule is Adam. Transformations after this one in an
    `optax.chain` run every microbatch. Therefore pass rates, schedules and weight decay to `adama`
    or `adamaw_a`.

    Raises OptimizerError for `accumulation_steps` below 1, `b1` or `b2` outside [0, 1), a negative
    `eps` or `eps_root`, an unknown `second_moment` or `moments`, and `nesterov` with several
    microbatches. `update` raises OptimizerError for gradients whose tree or shapes differ from the
    state's, and for a state of another `second_moment`.
    """
    numbers = b1, b2, eps, eps_root, mu_dtype
    settings = *numbers, nesterov, accumulation_steps, axis_name, second_moment
    return AdamA.of(Rule(*settings, moments=moments))


def adama(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    accumulation_steps: int = 1,
    axis_name: str | None = None,
    second_moment: Literal["squares", "row"] = "squares",
    moments: Literal["float", "int8"] = "float",
) -> AdamA:
    """Makes an optax transformation: `optax.adam` with several microbatches per update.

    `accumulation_steps` microbatches are a minibatch. Each microbatch's gradient is folded into the
    moments, so that no buffer accumulates gradients (AdamA, Algorithm 1).

    learning_rate: a number, or a schedule, which receives the number of finished minibatches.
    b1, b2, eps, eps_root, mu_dtype, nesterov, accumulation_steps, axis_name, second_moment,
      moments: as for `scale_by_adama`.

    Raises OptimizerError as `scale_by_adama` does, and for a `learning_rate` that is no finite
    number, no array and no schedule.
    """
    numbers = b1, b2, eps, eps_root, mu_dtype
    settings = *numbers, nesterov, accumulation_steps, axis_name, second_moment
    return AdamA.of(Rule(*settings, learning_rate, moments=moments))


def adamaw_a(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    nesterov: bool = False,
    accumulation_steps: int = 1,
    axis_name: str | None = None,
    second_moment: Literal["squares", "row"] = "squares",
    moments: Literal["float", "int8"] = "float",
) -> AdamA:
    """Makes an optax transformation: `optax.adamw` with several microbatches per update.

    `accumulation_steps` microbatches are a minibatch. Each microbatch's gradient is folded into the
    moments, so that no buffer accumulates gradients (AdamA, Algorithm 1). `update` needs `params`.

    learning_rate: a number, or a schedule, which receives the number of finished minibatches.
    b1, b2, eps, eps_root, mu_dtype, nesterov, accumulation_steps, axis_name, second_moment,
      moments: as for `scale_by_adama`.
    weight_decay: the rate of weight decay. Weights decay once per minibatch, by this rate times the
      learning rate.
    mask: a tree of booleans like the parameters, or a function from the parameters to such a tree.
      Only weights whose boolean is True decay. None means that all weights decay.

    Raises OptimizerError as `adama` does, and if `update` receives no `params`.
    """
    numbers = b1, b2, eps, eps_root, mu_dtype
    settings = *numbers, nesterov, accumulation_steps, axis_name, second_moment
    return AdamA.of(Rule(*settings, learning_rate, weight_decay, mask, moments))
