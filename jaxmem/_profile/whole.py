"""A step's program as a single device would run it: without what says how a mesh divides arrays.

Pieces of a step are priced whole, and their prices are divided by the number of devices. A sharding
in a piece would divide it before that. One that is part of an array's type (on a mesh whose axes
are explicit, as those of `jax.make_mesh` are) could not be left out of a piece's arguments alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxmem._jax.jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, body

# They return their operand, divided otherwise.
_DIVIDE = frozenset({"sharding_constraint", "reshard", "mesh_cast"})


def whole(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` without shardings, those in types too. What is inside `jax.shard_map` stays: it is
    one device's already.
    """
    return ClosedJaxpr(_Whole().jaxpr(closed.jaxpr), closed.consts)


class _Whole:
    """Programs made anew, each variable and each inner program once."""

    def __init__(self):
        self._vars: dict[Var, Any] = {}
        self._done: dict[int, Any] = {}
        self._kept: list = []  # whose ids are keys, so that none is used again

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        variables = lambda vs: [self._read(v) for v in vs]
        return jaxpr.replace(
            constvars=variables(jaxpr.constvars),
            invars=variables(jaxpr.invars),
            eqns=[new for eqn in jaxpr.eqns if (new := self._equation(eqn)) is not None],
            outvars=variables(jaxpr.outvars),
        )

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn | None:
        if eqn.primitive.name in _DIVIDE:
            self._vars[eqn.outvars[0]] = self._read(eqn.invars[0])
            return None
        inside = eqn.primitive.name == "shard_map"
        params = eqn.params if inside else {k: self._param(k, v) for k, v in eqn.params.items()}
        made = eqn.replace(
            invars=[self._read(v) for v in eqn.invars],
            outvars=[self._read(v) for v in eqn.outvars],
            params=params,
        )
        if not inside and not eqn.ctx.cur_abstract_mesh.empty:
            made = made.replace(ctx=_context())
        return made

    def _read(self, v) -> Any:
        if isinstance(v, Literal):
            return Literal(v.val, _plain(v.aval))
        if v not in self._vars:
            aval = _plain(v.aval)
            self._vars[v] = v if aval is v.aval else type(v)(aval)
        return self._vars[v]

    def _param(self, name: str, value):
        if type(value) in (tuple, list):  # others have names, as what describes a random key
            return type(value)(self._param(name, each) for each in value)
        if isinstance(value, NamedSharding) and "sharding" in name:
            return _unspecified() if name in ("in_shardings", "out_shardings") else None
        if (inside := body(value)) is None:
            return value
        if id(value) not in self._done:
            closed = isinstance(value, ClosedJaxpr)
            inner = self.jaxpr(inside)
            self._done[id(value)] = ClosedJaxpr(inner, value.consts) if closed else inner
            self._kept.append(value)
        return self._done[id(value)]


def _plain(aval):
    """A type without a sharding."""
    typed = getattr(aval, "sharding", None)
    if not isinstance(typed, NamedSharding) or typed.mesh.empty:
        return aval
    return aval.update(sharding=None)


@functools.cache
def _bare() -> JaxprEqn:
    """A call as JAX traces it where no mesh is."""
    with jax.set_mesh(None):
        return jax.make_jaxpr(jax.jit(jnp.negative))(0.0).eqns[0]


def _context():
    return _bare().ctx


def _unspecified():
    return _bare().params["in_shardings"][0]
