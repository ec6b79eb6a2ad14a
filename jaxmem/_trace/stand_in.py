"""Programs that run on made-up numbers, in place of programs that may not: a check in Python raises
for them, and a loop that ends by its values may not end.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._trace.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    as_closed,
    as_scan,
    equations,
    on_open,
    subjaxprs,
    with_programs,
)
from jaxmem._trace.rewrite import Node, bound_anywhere, branches, evaluated, flatten, with_branches

MOST_TURNS = 30  # of a loop that ends by its values


def calls_python(eqn) -> bool:
    """Whether an equation calls a Python function when it runs."""
    return "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print"


def needs_values(program) -> bool:
    """Whether a program may fail, or not end, on made-up numbers. The loops of a kernel end, and
    the branches of `jax.lax.platform_dependent` belong to their platforms.
    """
    inner = equations(program, lambda eqn: not _is_opaque(eqn))
    return any(calls_python(eqn) or eqn.primitive.name == "while" for eqn in inner)


def _is_opaque(eqn) -> bool:
    """Whether an equation is a kernel, or a choice by platform."""
    of_platforms = eqn.params.get("branches_platforms") is not None
    return of_platforms or eqn.primitive.name == "pallas_call"


def on_any_values(closed: ClosedJaxpr, *arrays) -> list:
    """The results of a program in which a call of Python returns zeros, and a while loop ends after
    `MOST_TURNS` iterations.
    """
    program = flatten(closed)
    values = program.constants | dict(zip(program.inputs, arrays))
    return evaluated(program.outputs, program.nodes, values, _results)


def _results(node: Node, operands: Sequence) -> Sequence:
    """The results of one operation of the program."""
    eqn = node.eqn
    if calls_python(eqn):
        return _zeros(eqn)
    inner = lambda name: functools.partial(on_any_values, as_closed(eqn.params[name]))
    if node.primitive == "while":
        first = len(operands) - len(eqn.outvars)
        middle = first - eqn.params["body_nconsts"]
        of_end, of_body, carry = operands[:middle], operands[middle:first], operands[first:]
        goes_on, changed = inner("cond_jaxpr"), inner("body_jaxpr")
        return jax.lax.while_loop(
            lambda all: (all[0] < MOST_TURNS) & jnp.any(goes_on(*of_end, *all[1])[0]),
            lambda all: (all[0] + 1, tuple(changed(*of_body, *all[1]))),
            (0, tuple(carry)),
        )[1]
    if _is_opaque(eqn) or not any(map(needs_values, subjaxprs(eqn))):
        return bound_anywhere(node, operands)
    if (scan := as_scan(eqn)) is not None:
        iteration, first = inner("jaxpr"), scan.consts + scan.carry

        def turn(carry, xs):
            results = iteration(*operands[: scan.consts], *carry, *xs)
            return tuple(results[: scan.carry]), tuple(results[scan.carry :])

        carry, sliced = tuple(operands[scan.consts : first]), tuple(operands[first:])
        last, stacked = jax.lax.scan(turn, carry, sliced, scan.length, eqn.params["reverse"])
        return [*last, *stacked]
    functions = [functools.partial(on_any_values, each) for each in branches(node)]
    return bound_anywhere(with_branches(node, functions) if functions else node, operands)


def _zeros(eqn) -> list:
    """Zeros in place of an equation's results."""
    return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def without_python(traced: jax.stages.Traced) -> jax.stages.Traced:
    """A traced step whose calls of Python return zeros. JAX lowers such a call only for a device of
    the process, and exports none.
    """
    calls = [eqn for eqn in equations(traced.jaxpr.jaxpr) if calls_python(eqn)]
    if not calls:
        return traced
    effects = {type(effect) for eqn in calls for effect in eqn.effects}
    other: Any = copy.copy(traced)
    # Remove with a public name: JAX 0.10 to 0.12 changes no program of a `Traced`.
    quiet = on_open(traced.jaxpr, functools.partial(_quiet, effects=effects))
    other._params = other._params | {"jaxpr": quiet}
    other._lojax = None
    return other


def _quiet(program: Jaxpr, effects: set[type]) -> Jaxpr:
    """A jaxpr without calls of Python, and without their effects. A program in it that calls no
    Python stays the same object: JAX lowers a program once that is called several times.
    """
    if not any(map(calls_python, equations(program))):
        return program
    others = lambda of: type(of)(e for e in of if type(e) not in effects)

    def replaced(eqn) -> list:
        if not calls_python(eqn):
            quiet = with_programs(eqn, functools.partial(_quiet, effects=effects))
            return [quiet.replace(effects=others(eqn.effects))]
        if not eqn.outvars:
            return []
        made = jax.make_jaxpr(lambda: jax.lax.optimization_barrier(_zeros(eqn)))().jaxpr.eqns
        return [*made[:-1], made[-1].replace(outvars=eqn.outvars)]

    eqns = [new for eqn in program.eqns for new in replaced(eqn)]
    return program.replace(eqns=eqns, effects=others(program.effects))
