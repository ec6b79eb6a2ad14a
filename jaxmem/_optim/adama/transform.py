"""AdamA as an optax transformation: gradients folded into Adam's moments a microbatch at a time,
never accumulated.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem._optim.adama.rows import Position
from jaxmem._optim.adama.rule import Moments, Rule
from jaxmem._trace.vary import varying, zeros
from jaxmem.errors import OptimizerError


class AdamAState(NamedTuple):
    """The state of AdamA between two microbatches.

    count: how many minibatches are finished, int32.
    folded: how many microbatches of the current minibatch are folded, int32.
    mu, nu: Adam's moments, trees like the parameters.
    """

    count: Any
    folded: Any
    mu: Any
    nu: Any

    @property
    def moments(self) -> Moments:
        """What gradients are folded into."""
        return Moments(self.mu, self.nu)


class RowState(NamedTuple):
    """The state of AdamA with `second_moment="row"`.

    count, folded, mu, nu: those of AdamAState.
    square, sketch: trees like the parameters with two float32 numbers for each of their rows.
    """

    count: Any
    folded: Any
    mu: Any
    nu: Any
    square: Any
    sketch: Any

    @property
    def moments(self) -> Moments:
        """What gradients are folded into."""
        return Moments(*self[2:])


State = AdamAState | RowState


def with_moments(state: State, moments: Moments) -> Any:
    """The state with these moments in place of its own."""
    return state._replace(**{k: v for k, v in moments._asdict().items() if k in state._fields})


class AdamA(optax.GradientTransformationExtraArgs):
    """An optax transformation whose parts other training loops may call: `begin`, `fold`, `finish`.

    A minibatch is `begin` once, `fold` for each of its `accumulation_steps` microbatches, `finish`
    once (AdamA, Algorithm 1). The states that `begin` and `fold` take may be of the whole model or
    of any part of it, such as one layer.
    """

    rule: Rule

    @staticmethod
    def of(rule: Rule) -> "AdamA":
        """The transformation that follows `rule`, and carries it for the released step to read."""
        update: Any = functools.partial(_update, rule)
        made = AdamA(functools.partial(_init, rule), update)
        made.rule = rule
        return made

    def begin(self, state: State) -> Any:
        """The state as a minibatch starts: b1 mu, and b2 nu or, with `axis_name`, devices * b2 nu
        (AdamA §3.3).
        """
        self.rule.check_rows(state.moments)
        return with_moments(state, self.rule.begin(state.moments))

    def fold(self, state: State, gradient) -> Any:
        """The state with mu + (1 - b1) g and nu + (1 - b2) g², where g is a microbatch's mean
        gradient / `accumulation_steps`; with the row ratio each row's signed sum of g too.

        gradient: a tree like `state.mu`.
        """
        self.rule.check_rows(state.moments)
        sums = functools.partial(Position(state.count).sums, gradient)
        folded = self.rule.fold(state.moments, gradient, sums)
        return with_moments(state._replace(folded=state.folded + 1), folded)

    def finish(
        self, state: State, params=None, stacked: tuple[bool, ...] | None = None
    ) -> tuple[Any, Any]:
        """The minibatch's updates, and the state that the next one begins with; all-reduced over
        `axis_name`.

        stacked: for each array of the state whether its first axis is that of layers, whose rows
          then tell nothing of each other; None where it is not known.

        Raises OptimizerError with `nesterov`, whose update needs the gradient: `update` alone has
        it.
        """
        if self.rule.nesterov:
            raise OptimizerError(
                "finish: `nesterov` needs the minibatch's gradient; expected `update` to be called"
                " instead"
            )
        self.rule.check_rows(state.moments)
        return _finish(self.rule, state, params, stacked=stacked)


def _init(rule: Rule, params) -> State:
    # Each counter is an array of its own: donating a state that holds one buffer twice is an error.
    zero = lambda: jnp.zeros((), jnp.int32)
    moments = rule.start(params)
    if moments.square is None:
        return AdamAState(zero(), zero(), moments.mu, moments.nu)
    return RowState(zero(), zero(), *moments)


def _finish(
    rule: Rule, state: State, params, gradient=None, stacked: tuple[bool, ...] | None = None
) -> tuple[Any, Any]:
    """Ends a minibatch: reduces the moments over devices, and makes the updates from them.

    stacked: for each array whether its first axis is that of layers; None where it is not known.
    """
    moments, nu = rule.settled(rule.reduced(state.moments), state.count, stacked=stacked)
    updates = rule.updates(moments.mu, nu, state.count, params, gradient)
    counted = state._replace(
        count=optax.safe_increment(state.count), folded=jnp.zeros_like(state.folded)
    )
    return updates, with_moments(counted, moments)


def _update(rule: Rule, updates, state: State, params=None, **_):
    """`update` of the transformation: a fold, and the minibatch's update after its last one."""
    rule.check(updates, state.moments, params)
    # Only a minibatch's first microbatch begins with decayed moments; how many are folded is known
    # when the step runs, not when it is traced.
    begun = rule.begin(state.moments)
    if not rule.single:
        now = varying(state.moments, rule.axis_name)
        begun = jax.tree.map(lambda new, old: jnp.where(state.folded == 0, new, old), begun, now)
    sums = functools.partial(Position(state.count).sums, updates)
    moments = rule.fold(begun, updates, sums)
    folded = with_moments(state._replace(folded=state.folded + 1), moments)
    whole = (
        None
        if rule.axis_name is None or not rule.nesterov
        else jax.lax.pmean(updates, rule.axis_name)
    )

    def finish():
        new, finished = _finish(rule, folded, params, updates if whole is None else whole)
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
    """The new state with the types of the old one, so that both branches of the `cond` agree.

    That takes the old dtypes, and moments that may differ from device to device, although those
    that were just reduced do not.
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
) -> AdamA:
    """`optax.scale_by_adam` over minibatches of `accumulation_steps` microbatches, without a
    gradient buffer (AdamA).

    b1, b2: decay rates of the two moments, in [0, 1).
    eps, eps_root: added outside and under the root, as optax does.
    mu_dtype: the first moment's dtype; None means the parameter's.
    nesterov: Nesterov momentum; with one microbatch only, since it needs the whole gradient.
    accumulation_steps: how many microbatches make a minibatch, at least 1.
    axis_name: an axis of `jax.shard_map`, for data parallelism with each device's own gradient:
      moments stay local until the minibatch's last microbatch, and are then reduced once (AdamA
      §3.3).
    second_moment: what steps are divided by. "squares" is the paper's: nu gathers the sum of the
      microbatches' squared gradients, not the square of their sum, so that it is up to N times too
      small where N microbatches agree. "row" scales it by a ratio a row, between 1 and N, which
      tells how much they agree: what Adam's nu is to AdamA's, summed over the row. Adam's is told
      without a gradient buffer by the square of the row's sum with random signs, which adds up over
      microbatches and whose expectation is the squared norm of the row's mean gradient. It takes 8
      bytes a row. Rows run along an array's last axis, or its last ones if that is short.

    `update` is called with each microbatch's mean gradient, and returns zeros until the minibatch's
    last. With one microbatch it is Adam. What follows it in `optax.chain` runs every microbatch, so
    rates, schedules and decay belong in `adama` or `adamaw_a`.

    Raises OptimizerError for `accumulation_steps` below 1, `b1` or `b2` outside [0, 1), another
    `second_moment`, or `nesterov` with more than one microbatch; `update` does for gradients whose
    tree or shapes are not those of the state, or a state of another `second_moment`.
    """
    moments = b1, b2, eps, eps_root, mu_dtype
    return AdamA.of(Rule(*moments, nesterov, accumulation_steps, axis_name, second_moment))


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
) -> AdamA:
    """`optax.adam` over minibatches of `accumulation_steps` microbatches, without a gradient buffer
    (AdamA, Algorithm 1).

    learning_rate: a number, or a schedule of the number of finished minibatches.
    b1, b2, eps, eps_root, mu_dtype, nesterov, accumulation_steps, axis_name, second_moment: those
      of `scale_by_adama`, which also says what is raised.
    """
    moments = b1, b2, eps, eps_root, mu_dtype
    rule = Rule(*moments, nesterov, accumulation_steps, axis_name, second_moment)
    return AdamA.of(dataclasses.replace(rule, learning_rate=learning_rate))


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
) -> AdamA:
    """`optax.adamw` over minibatches of `accumulation_steps` microbatches, without a gradient
    buffer (AdamA).

    learning_rate: a number, or a schedule of the number of finished minibatches.
    b1, b2, eps, eps_root, mu_dtype, nesterov, accumulation_steps, axis_name, second_moment: those
      of `scale_by_adama`, which also says what is raised.
    weight_decay: what weights decay by once a minibatch, times the learning rate.
    mask: a tree of booleans like the parameters, or a function that makes one of them; weights of
      which it is true decay. None means all.

    `update` needs `params`.
    """
    moments = b1, b2, eps, eps_root, mu_dtype
    rule = Rule(*moments, nesterov, accumulation_steps, axis_name, second_moment)
    return AdamA.of(
        dataclasses.replace(rule, learning_rate=learning_rate, weight_decay=weight_decay, mask=mask)
    )
