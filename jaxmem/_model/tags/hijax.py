"""The tag under JAX's next checkpoint, the option `jax_remat3` of JAX 0.12: a `HiPrim` whose
`remat` rule carries out a plan's action.

JAX runs a checkpointed block once, in two traces at the same time: the forward, and the program
that recomputes the block in the backward. `HijaxTag.remat` returns the tag's value in the forward,
the arrays that are stored, and a function that makes the tag's value in the backward. There the
value is decoded, and its derivative is the derivative of the recomputed value (`Relinked`). JAX
drops the recomputed value itself, since nothing reads it.

The rule asks a policy about `tag_p`, the primitive of the other implementation, as JAX's rule for
`checkpoint_name` does. Therefore policies and `Storage` serve both implementations unchanged. The
alternative is a question of its own, with the type `HijaxTag` in place of a primitive: then each
policy would know both implementations.

JAX 0.12.0.1 offers less to policies under this option than without it:

- A policy is asked about matrix products, convolutions, values of `checkpoint_name` and `HiPrim`s.
  Every other operation is recomputed, and a `while` loop with all that it contains. JAX compares a
  policy with `everything_saveable` by identity. Therefore no policy of jaxmem can keep every tensor
  of a block, and `for_jax` returns `everything_saveable` itself.
- JAX's rule of `checkpoint_name` saves, offloads or recomputes a value, and takes no codes. Once a
  policy compresses or offloads, `let_names_be_encoded` replaces the rule, as `primitive.py` does
  without this option. JAX exports neither the class of these values nor a registry of rules. So
  the class is taken from a trace, and the rule is set on the class.
- A `jax.custom_jvp` function is recomputed as a whole, and so is a `jax.custom_vjp` function
  without the option `jax_custom_vjp3`. No policy is asked about tags inside them. Therefore
  `SelfTagged` is a `HiPrim` of its own, and `tagging` requires both options.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.hijax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, Saveable, checkpoint_name

from jaxmem._model.tags.combined import answer, parts
from jaxmem._model.tags.implementation import Offloaded, called, divided_as
from jaxmem._model.tags.primitive import name_p, tag_p
from jaxmem.errors import TagError

# Remove with JAX 0.11: the type `Any`. JAX 0.11 lacks names of the module, and no version before
# JAX 0.12 runs this file.
_hijax: Any = jax.experimental.hijax


class _Linear(_hijax.HiPrim):
    """Forward and reverse mode from the rules `lin` and `linearized`."""

    jvp = _hijax.jvp_from_lin
    vjp_fwd, vjp_bwd_retval = _hijax.vjp_from_lin


class HijaxTag(_Linear):
    """An identity, except inside `jax.checkpoint`. Its derivative does not tag the tangent: only
    the value may be stored.
    """

    def __init__(self, aval, name: str, kind: str | None, codec: str | None):
        self.in_avals, self.out_aval = (aval,), aval
        self.params = {"name": name, "kind": kind, "codec": codec}
        super().__init__()

    def expand(self, x):
        return x

    def remat(self, trace, x):
        return _remat(self, trace, x, tag_p)

    def lin(self, nzs_in, x):
        return self(x), None, nzs_in[0]

    def linearized(self, residuals, t):
        return t

    def batch(self, axis_data, args, dims):
        return bind(args[0], **self.params), dims[0]


def _remat(primitive, trace, x, asked):
    """The rule `remat` of an identity that names a value.

    primitive: the identity, a `HiPrim` with the parameter `name`.
    asked: the primitive of the other implementation, about which the policy is asked.
    """
    value, codes, decode = _divided(primitive, trace, x, asked)
    if decode is None:
        return value, (), lambda _, x: primitive(x)
    return value, codes, lambda codes, x: _relinked(decode(codes), primitive(x))


def _divided(primitive, trace, x, asked):
    """Returns the forward's value, the stored arrays, and the function of the stored arrays that
    makes the backward's value; None for the function if the value is recomputed. Arguments as for
    `_remat`.
    """
    (aval,), name = primitive.in_avals, primitive.params["name"]
    if trace.policy is None:  # JAX's form of `nothing_saveable`
        return primitive(x), (), None
    verdict = answer(trace.policy, asked, aval, **primitive.params)
    if isinstance(verdict, Offloadable):  # from a user's policy, or from `Policy` on a named value
        verdict = Offloaded(verdict)
    if hasattr(verdict, "encode"):
        encode = called(lambda x: tuple(verdict.encode(x)), f"{name}_encode")
        decode = called(
            lambda codes: divided_as(aval, verdict.decode(codes, aval.shape, aval.dtype)),
            f"{name}_decode",
        )
        try:
            codes = encode(x)
        except TagError as error:
            raise TagError(f"tag {name!r}: {error}") from error
        return primitive(x), codes, decode
    if verdict is Saveable or verdict is True:
        kept = _at_own_precision(primitive(x))
        return kept, kept, lambda kept: kept
    return primitive(x), (), None


@functools.cache
def _names() -> Any:
    """Returns the class of the values of `checkpoint_name`, from a trace under the option."""
    # Remove with a public name: JAX 0.12 exports none for the class.
    (equation,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "x"))(0.0).eqns
    (found,) = (type(p) for p in equation.params.values() if isinstance(p, _hijax.HiPrim))
    return found


def let_names_be_encoded() -> None:
    """Lets the tag's rule serve a value of `checkpoint_name` if the value is complex, which JAX's
    rule does not store, if the policy encodes the value, or if the policy is a combination of
    policies: `save_from_both_policies` of JAX refuses a policy that offloads.
    """
    if names_are_encoded():
        return
    of_jax = _names().remat

    @functools.wraps(of_jax)
    def remat(primitive, trace, x):
        policy, aval = trace.policy, primitive.in_avals[0]
        is_ours = policy is not None and (
            jnp.issubdtype(aval.dtype, jnp.complexfloating)
            or len(parts(policy)) > 1
            or hasattr(answer(policy, name_p, aval, **primitive.params), "encode")
        )
        return _remat(primitive, trace, x, name_p) if is_ours else of_jax(primitive, trace, x)

    _names().remat = remat


def names_are_encoded() -> bool:
    """Whether the tag's rule serves values of `checkpoint_name`."""
    return hasattr(_names().remat, "__wrapped__")


def bind(x, *, name: str, kind: str | None, codec: str | None):
    """Tags `x`."""
    return HijaxTag(jax.typeof(x), name, kind, codec)(x)


class Relinked(_Linear):
    """The value of the first operand, with the derivative of the second operand. A second
    derivative differentiates the first operand, which the forward computed.
    """

    def __init__(self, stored, recomputed):
        self.in_avals, self.out_aval, self.params = (stored, recomputed), stored, {}
        super().__init__()

    def expand(self, stored, recomputed):
        return stored

    def lin(self, nzs_in, stored, recomputed):
        return stored, None, nzs_in[1]

    def linearized(self, residuals, of_stored, of_recomputed):
        return of_recomputed

    def batch(self, axis_data, args, dims):
        return _relinked(*_hijax.bdims_at_front(axis_data, args, dims)), 0


def _relinked(stored, recomputed):
    return Relinked(jax.typeof(stored), jax.typeof(recomputed))(stored, recomputed)


class SelfTagged(_Linear):
    """An operation with a tagged result, whose derivative reads the result.

    forward: the operation.
    tangent: computes the result's tangent from the result and the operand's tangent.
    tag: the tag of the result.
    """

    def __init__(self, aval, forward: Callable, tangent: Callable, tag: HijaxTag):
        self.in_avals, (self.out_aval,) = (aval,), tag.in_avals
        self.params = {"forward": forward, "tangent": tangent, "tag": tag}
        super().__init__()

    def expand(self, x):
        return self.params["forward"](x)

    def remat(self, trace, x):
        tangent = self.params["tangent"]
        value, codes, decode = _divided(self.params["tag"], trace, self(x), tag_p)
        if decode is None:
            return value, (), lambda _, x: self(x)
        return value, codes, lambda codes, x: _derived(decode(codes), x, tangent)

    def lin(self, nzs_in, x):
        value = self(x)
        return value, value, nzs_in[0]

    def linearized(self, residuals, t):
        return self.params["tangent"](residuals, _hijax.instantiate_zeros(t))

    def batch(self, axis_data, args, dims):
        (x,) = _hijax.bdims_at_front(axis_data, args, dims)
        forward, tangent = (jax.vmap(self.params[name]) for name in ("forward", "tangent"))
        return self_tagged_by(forward, tangent, x, **self.params["tag"].params), 0


def self_tagged_by(forward: Callable, tangent: Callable, x, **params):
    """Returns the result of the operation on `x`, under the tag with these parameters."""
    tag = HijaxTag(jax.typeof(jax.eval_shape(forward, x)), **params)
    return SelfTagged(jax.typeof(x), forward, tangent, tag)(x)


class Derived(_Linear):
    """The value of the first operand, which an operation computed from the second operand. The
    operation's tangent is `tangent(value, tangent of the second operand)`. A second derivative
    differentiates the first operand.
    """

    def __init__(self, value, x, tangent: Callable):
        self.in_avals, self.out_aval, self.params = (value, x), value, {"tangent": tangent}
        super().__init__()

    def expand(self, value, x):
        return value

    def lin(self, nzs_in, value, x):
        return value, value, nzs_in[1]

    def linearized(self, residuals, of_value, of_x):
        return self.params["tangent"](residuals, _hijax.instantiate_zeros(of_x))

    def batch(self, axis_data, args, dims):
        value, x = _hijax.bdims_at_front(axis_data, args, dims)
        return _derived(value, x, jax.vmap(self.params["tangent"])), 0


def _derived(value, x, tangent: Callable):
    return Derived(jax.typeof(value), jax.typeof(x), tangent)(value, x)


def _at_own_precision(x):
    """Rounds a real value to its own precision, as JAX does with the values that it saves itself:
    XLA then stores no wider values.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    of = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, exponent_bits=of.nexp, mantissa_bits=of.nmant)
