"""The tag under today's `jax.checkpoint`: an identity primitive whose partial-evaluation rule
carries out a plan's action. The rule also serves JAX's own `checkpoint_name`, once a policy
compresses.

No other file touches partial-evaluation internals. Inside `jax.checkpoint` the policy's answer
decides what the backward gets: the value (`Saveable`), nothing (`Recompute`), or codes. With
codes the known (forward) program is `x -> x, *encode(x)`, the staged (backward) program is
`decode(codes) -> x`, and the codes are the residuals. The forward stays bit-exact, every backward
consumer sees the decoded value, and the producer is not recomputed.

An identity primitive (`once_p`) refuses second derivatives through codes. The alternative is a
`custom_jvp` rule. The partial evaluation of a scan drops a `custom_jvp` rule, and does not drop a
primitive.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, Saveable, checkpoint_name
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jaxmem._model.tags.combined import answer
from jaxmem._model.tags.implementation import Offloaded, called, divided_as, todays_checkpoint
from jaxmem.errors import TagError

# Remove with today's checkpoint: the file, except for what `hijax.py`, policies and the rectifier
# read.


def identity(name: str) -> Primitive:
    """Returns a new primitive that passes its operand on. The caller defines its derivative, and
    may replace its batching rule.
    """
    made = Primitive(name)
    made.def_impl(lambda x, **_: x)
    made.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(made, lambda ctx, x, **_: [x])
    batched = lambda args, dims, **params: (made.bind(args[0], **params), dims[0])
    batching.primitive_batchers[made] = batched
    return made


# An identity, except in partial evaluation. Its derivative tags the value and not the tangent: only
# the value may become a residual.
tag_p = identity("jaxmem_tag")
ad.primitive_jvps[tag_p] = lambda p, t, **params: (tag_p.bind(p[0], **params), t[0])
bind = tag_p.bind


def _name_primitive() -> Primitive:
    """Returns the primitive of `checkpoint_name`, for which JAX exports no name: the primitive in a
    trace without the option `jax_remat3`. With the option, JAX asks policies about this primitive
    too, but a trace does not have it.
    """
    # Remove with a public name: JAX 0.10 to 0.12 exports none for the primitive.
    with todays_checkpoint():
        return jax.make_jaxpr(lambda x: checkpoint_name(x, "x"))(0.0).eqns[0].primitive


name_p = _name_primitive()

# An identity without a derivative. A primitive, since a custom_jvp rule is dropped by the partial
# evaluation of a scan.
once_p = identity("jaxmem_differentiable_once")


def _no_derivative(primals, tangents, *, message):
    """The derivative rule of `once_p`: raises the error for the user."""
    raise TagError(message)


ad.primitive_jvps[once_p] = _no_derivative


def differentiable_once(x, message: str):
    """Returns `x`. A derivative through the result raises TagError with this message: codes have no
    derivative, and the gradient would silently lack a term.
    """
    return once_p.bind(x, message=message)


@jax.disable_jit(False)
def _traced(function, avals, name):
    """Traces `function` to one equation, a call of `jit` with the name `name`."""
    (equation,) = jax.make_jaxpr(called(function, name))(*avals).eqns
    return equation


def divided_tag(policy, unknown_in, inst_in, eqn):
    """The rule by which `jax.checkpoint` divides a tag between forward and backward.

    Returns the equation of the known (forward) program, or None; the equation of the staged
    (backward) program, or None; whether each output is unknown in the forward; whether the staged
    program makes each output; and the residuals, the variables that the forward passes to the
    backward.

    policy: decides which values are saved.
    unknown_in: for the single input, whether it is unknown in the forward.
    inst_in: for the single input, whether the staged program has it already.
    eqn: the tag, or the value that `checkpoint_name` names.
    """
    (unknown,), (inst,), (x,), (y,) = unknown_in, inst_in, eqn.invars, eqn.outvars
    if unknown:  # the tag belongs to the backward alone
        return None, eqn, [True], [True], [] if inst else [x]
    verdict = answer(policy, eqn.primitive, x.aval, **eqn.params)
    if isinstance(verdict, Offloadable):  # from a user's policy, or from `Policy` on a named value
        verdict = Offloaded(verdict)
    if jnp.issubdtype(x.aval.dtype, jnp.complexfloating):
        verdict = _in_parts(verdict)
    # Codes: the forward returns `x` and its codes, and the backward makes the tag's output from the
    # codes only. `x` is not a residual, so it is not recomputed.
    if hasattr(verdict, "encode"):
        name, aval = eqn.params["name"], x.aval
        held = lambda a: (a, *verdict.encode(a))
        try:
            encode = _traced(held, [aval], f"{name}_encode")
        except TagError as error:
            raise TagError(f"tag {name!r}: {error}") from error
        codes = [Var(v.aval) for v in encode.outvars[1:]]
        decode = _traced(
            lambda *c: divided_as(aval, verdict.decode(c, aval.shape, aval.dtype)),
            [c.aval for c in codes],
            f"{name}_decode",
        )
        return (
            encode.replace(invars=[x], outvars=[y, *codes]),
            decode.replace(invars=codes, outvars=[y]),
            [False],
            [True],
            codes,
        )
    # Kept: the output is known, and JAX makes it a residual if the backward reads it.
    if verdict is Saveable or verdict is True:
        return eqn, None, [False], [False], []
    # Recomputed: the tag is in both programs, and the staged program needs the tag's input. A
    # policy that answers with a function replaces the tag of the forward, to observe the value.
    known = eqn
    if callable(verdict):
        marked = _traced(verdict, [x.aval], eqn.params["name"])
        known = marked.replace(invars=[x], outvars=[y])
    return known, eqn, [False], [True], [] if inst else [x]


pe.partial_eval_jaxpr_custom_rules[tag_p] = divided_tag


class _Parts:
    """Stores a complex value as its real and its imaginary part. JAX rounds the saved values of
    `jax.checkpoint` to their own precision, so that XLA stores no wider values, and cannot round
    complex values.

    moved: moves both parts to another memory; None leaves them in device memory.
    """

    def __init__(self, moved: Offloaded | None):
        self._moved = moved

    def encode(self, x):
        parts = (jnp.real(x), jnp.imag(x))
        return parts if self._moved is None else [c for p in parts for c in self._moved.encode(p)]

    def decode(self, codes, shape, dtype):
        if self._moved is not None:
            codes = [self._moved.decode((c,), shape, c.dtype) for c in codes]
        return jax.lax.complex(*codes)


def _in_parts(verdict):
    """Returns the verdict on a complex value that replaces `verdict`."""
    if verdict is Saveable or verdict is True:
        return _Parts(None)
    return _Parts(verdict) if isinstance(verdict, Offloaded) else verdict


def let_names_be_encoded() -> None:
    """Registers the tag's rule for values of `checkpoint_name`. A policy may then answer with a
    codec, and an offloading policy may be combined with another policy.

    With policies that save or recompute, the rule does not change programs. With a policy that
    offloads, the copies are inside a call, which XLA inlines. Therefore the rule is registered only
    when a policy compresses or offloads.
    """
    pe.partial_eval_jaxpr_custom_rules.setdefault(name_p, divided_tag)


def names_are_encoded() -> bool:
    """Whether the tag's rule serves values that `checkpoint_name` names."""
    return name_p in pe.partial_eval_jaxpr_custom_rules
