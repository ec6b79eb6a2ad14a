"""The tag primitive: an identity whose partial-evaluation rule carries out a plan's action.

The one file that touches partial-evaluation internals. Inside `jax.checkpoint` the policy's answer
decides what the
backward gets: the value (`Saveable`), nothing (`Recompute`), or codes: then the known (forward)
program is
`x -> x, *encode(x)`, the staged (backward) program is `decode(codes) -> x`, and the codes are the
residuals. The forward stays bit-exact, every backward consumer sees the decoded value, and the
producer is not recomputed.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Saveable
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jaxmem._codecs.registry import default_for, parse
from jaxmem.errors import TagError

tag_p = Primitive("jaxmem_tag")
tag_p.def_impl(lambda x, **_: x)
tag_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(tag_p, lambda ctx, x, **_: [x])
ad.primitive_jvps[tag_p] = lambda p, t, **params: (tag_p.bind(p[0], **params), t[0])
batching.primitive_batchers[tag_p] = lambda args, dims, **params: (
    tag_p.bind(args[0], **params),
    dims[0],
)

# An identity without a derivative. A primitive, since a custom_jvp rule is dropped by the partial
# evaluation of a scan.
once_p = Primitive("jaxmem_differentiable_once")
once_p.def_impl(lambda x, **_: x)
once_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(once_p, lambda ctx, x, **_: [x])
batching.primitive_batchers[once_p] = lambda args, dims, **params: (
    once_p.bind(args[0], **params),
    dims[0],
)


def _no_derivative(primals, tangents, *, message):
    raise TagError(message)


ad.primitive_jvps[once_p] = _no_derivative


def differentiable_once(x, message: str):
    """`x`; a derivative of what is computed from it, which codes would silently leave out, is a
    TagError.
    """
    return once_p.bind(x, message=message)


def tag(x, name: str, *, kind: str | None = None, codec: str | None = None):
    """Names a tensor of a block, so that a plan can decide what becomes of it; returns `x`.

    Outside `jax.checkpoint` a tag is free: the compiled program is the same with and without it.

    `x`: an array of any shape and dtype. `kind`: what the tensor is (`jaxmem.codecs.KINDS`), which
    decides its codec.
    `codec`: a codec, or its text form, that replaces the kind's.
    Raises TagError if `name` is not a non-empty string, or `kind` or `codec` is unknown.
    """
    if not isinstance(name, str) or not name or name == "*":
        raise TagError(
            f"tag: `name` is {name!r}; expected a non-empty string other than '*', unique within"
            " its block"
        )
    if kind is not None:
        default_for(kind)
    if codec is not None:
        codec = str(parse(str(codec)))
    return tag_p.bind(jnp.asarray(x), name=name, kind=kind, codec=codec)


def _traced(function, avals, name):
    function.__name__ = name
    (equation,) = jax.make_jaxpr(jax.jit(function))(*avals).eqns
    return equation


def _partial_eval(policy, unknown_in, inst_in, eqn):
    (unknown,), (inst,), (x,), (y,) = unknown_in, inst_in, eqn.invars, eqn.outvars
    if unknown:
        return None, eqn, [True], [True], [] if inst else [x]
    verdict = policy(tag_p, x.aval, **eqn.params)
    if hasattr(verdict, "encode"):
        name, aval = eqn.params["name"], x.aval
        encode = _traced(lambda a: (a, *verdict.encode(a)), [aval], f"{name}_encode")
        codes = [Var(v.aval) for v in encode.outvars[1:]]
        decode = _traced(
            lambda *c: verdict.decode(c, aval.shape, aval.dtype),
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
    if verdict is Saveable or verdict is True:
        return eqn, None, [False], [False], []
    return eqn, eqn, [False], [True], [] if inst else [x]


pe.partial_eval_jaxpr_custom_rules[tag_p] = _partial_eval
