"""A step's program as a single device would run it, without the shardings by which a mesh divides
arrays.

Pieces of a step are priced whole, and their prices are divided by the number of devices. So the
program that pieces are taken from names no mesh, and no mesh is set while pieces are traced
(`times.py`). Otherwise some pieces would be programs for several devices, and their prices would be
divided twice. Pieces of explicit meshes, such as `jax.make_mesh` makes, would be refused: there a
sharding is part of an array's type, and cannot be left out of a piece's arguments alone.

A `jax.shard_map` runs on several devices only, and is kept. Its mesh loses its devices, which may
not be the target's, and its axes become automatic: XLA then divides the operations around it in the
piece.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxmem._trace.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    body,
    hijax_params,
    is_reference,
)
from jaxmem._trace.vary import mapped_axes

# They return their operand, divided otherwise.
_DIVIDE = frozenset({"sharding_constraint", "reshard"})
_NOT = PartitionSpec()


def without_shardings(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` without shardings, those in types too, also inside `jax.shard_map`."""
    return ClosedJaxpr(_Unsharded().jaxpr(closed.jaxpr), closed.consts)


class _Unsharded:
    """Programs made anew, each variable and each inner program once.

    mesh, axes: the mesh, without devices, and the axes of the `jax.shard_map` whose body the
      programs are; None for a program outside.
    """

    def __init__(self, mesh=None, axes: Iterable[str] = ()):
        self._mesh, self._context = None, _bare().ctx
        if mesh is not None:
            self._context = _inside(mesh, frozenset(axes))
            self._mesh = self._context.cur_abstract_mesh
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
        """An equation without shardings; None for one that only changes a sharding."""
        if eqn.primitive.name in _DIVIDE:
            self._vars[eqn.outvars[0]] = self._read(eqn.invars[0])
            return None
        params = eqn.params
        if (axes := mapped_axes(eqn)) is not None:
            mesh = _automatic(params["mesh"])
            inside = _Unsharded(mesh, axes).jaxpr(params["jaxpr"])
            params = params | {"mesh": mesh, "jaxpr": inside}
        else:
            # A kernel's program knows no mesh. A `HiPrim` is no equation that can be changed.
            whole = eqn.primitive.name == "pallas_call" or hijax_params(eqn)
            own = lambda k, v: v if whole and body(v) is not None else self._param(k, v)
            params = {k: own(k, v) for k, v in params.items()}
        made = eqn.replace(
            invars=[self._read(v) for v in eqn.invars],
            outvars=[self._read(v) for v in eqn.outvars],
            params=params,
        )
        return made if eqn.ctx.cur_abstract_mesh.empty else made.replace(ctx=self._context)

    def _read(self, v) -> Any:
        """A variable or a literal, with a type that names no mesh axis."""
        if isinstance(v, Literal):
            # A number of JAX's own type remembers the mesh of the trace in which it was made.
            aval: Any = v.aval
            number = np.asarray(v.val, aval.dtype) if hasattr(v.val, "aval") else v.val
            return Literal(number, self._plain(aval))
        if v not in self._vars:
            aval = self._plain(v.aval)
            self._vars[v] = v if aval is v.aval else type(v)(aval)
        return self._vars[v]

    def _param(self, name: str, value):
        """A parameter of an equation, without shardings in it or in its jaxprs."""
        if type(value) in (tuple, list):  # others have names, as what describes a random key
            return type(value)(self._param(name, each) for each in value)
        if isinstance(value, NamedSharding) and "sharding" in name:
            # Remove with a public name: JAX 0.10 to 0.12 exports none for an unspecified sharding.
            unspecified = _bare().params["in_shardings"][0]
            return unspecified if name in ("in_shardings", "out_shardings") else None
        if isinstance(value, AbstractValue):  # such as the types of a kernel's results
            return self._plain(value)
        if (inside := body(value)) is None:
            return value
        if id(value) not in self._done:
            # Remove with JAX 0.10: open jaxprs, which are another type there.
            closed = isinstance(value, ClosedJaxpr)
            inner = self.jaxpr(inside)
            self._done[id(value)] = ClosedJaxpr(inner, value.consts) if closed else inner
            self._kept.append(value)
        return self._done[id(value)]

    def _plain(self, aval):
        """A type that names no axis that divides it."""
        typed = getattr(aval, "sharding", None)
        # A reference has the sharding of its array.
        if not isinstance(typed, NamedSharding) or typed.mesh.empty or is_reference(aval):
            return aval
        if self._mesh is None:
            return aval.update(sharding=None)
        return aval.update(sharding=NamedSharding(self._mesh, PartitionSpec(*[None] * aval.ndim)))


def _automatic(mesh) -> AbstractMesh:
    """The mesh without devices, with its explicit axes made automatic."""
    # It remembers the kind of its devices, as types inside kernels do.
    kinds = zip(mesh.axis_names, mesh.axis_types)
    changed = {name: AxisType.Auto for name, kind in kinds if kind is AxisType.Explicit}
    return mesh.abstract_mesh.update_axis_types(changed)


@functools.cache
def _bare() -> JaxprEqn:
    """A call as JAX traces it where no mesh is."""
    with jax.set_mesh(None):
        return jax.make_jaxpr(jax.jit(jnp.negative))(0.0).eqns[0]


@functools.cache
def _inside(mesh: AbstractMesh, manual: frozenset[str]):
    """The context of an equation inside a `jax.shard_map`."""
    mapped = jax.shard_map(
        jnp.negative, mesh=mesh, in_specs=_NOT, out_specs=_NOT, axis_names=manual
    )
    with jax.sharding.use_abstract_mesh(mesh):
        body_of = jax.make_jaxpr(mapped)(0.0).eqns[0].params["jaxpr"]
    return body_of.eqns[0].ctx
