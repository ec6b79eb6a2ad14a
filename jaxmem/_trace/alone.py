"""Follows an optimizer's update through its trace: the parameters that each array depends on, and
the equations that update some arrays without the others.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._trace.jaxpr import Literal, equations
from jaxmem._trace.primitives import POINTWISE, POINTWISE_DEAR, RANDOM
from jaxmem._trace.rewrite import Program, evaluated, flatten, leading_to

Labels = frozenset[int]
_NONE: Labels = frozenset()
# These operations move values to other positions of an array, also if its shape is unchanged.
_MOVES = frozenset({"rev", "gather", "iota", "dynamic_slice", "concatenate", "pad"})
_BY_VALUE = (POINTWISE | POINTWISE_DEAR | {"copy", "reduce_precision", "pvary"}) - _MOVES


@dataclasses.dataclass(frozen=True, eq=False)
class Alone:
    """A traced optimizer, whose equations for some parameters can run without the others.

    flat: the trace. Its inputs are the leaves of (gradients, parameters, state), and its outputs
      the leaves of (new parameters, new state).
    names: the parameters' names, one for each leaf.
    structure: the tree structure of the state.
    owners: for each leaf of the state, the number of the parameter that it belongs to; None of one
      that depends on no parameter or gradient, such as a counter or a rate.
    follows: for each leaf of the state, whether its first value depends on parameters.
    coupled: the numbers of two parameters on which one update, or one array of the state, depends;
      None if every update depends on one parameter.
    mixed: the number of the first parameter whose update mixes values at different positions; None
      if all updates are elementwise, so that parts of the arrays give parts of the results.
    draws: whether it draws random numbers.
    """

    flat: Program
    names: tuple[str, ...]
    structure: Any
    owners: tuple[int | None, ...]
    follows: tuple[bool, ...]
    coupled: tuple[int, ...] | None
    mixed: int | None
    draws: bool

    @staticmethod
    def of(init: Callable, update: Callable, params) -> "Alone":
        """Traces an optimizer.

        init: `init(params) -> state`.
        update: `update(gradients, params, state) -> (params, state)`.
        params: shapes.
        """
        leaves, structure = jax.tree.flatten(params)
        started, state = jax.make_jaxpr(init, return_shape=True)(params)
        states, of_state = jax.tree.flatten(state)

        def flat_update(gradients, params, states):
            trees = (jax.tree.unflatten(structure, a) for a in (gradients, params))
            return jax.tree.leaves(update(*trees, jax.tree.unflatten(of_state, states)))

        traced = jax.make_jaxpr(flat_update)(leaves, leaves, states)
        flat, count = flatten(traced), len(leaves)
        own = [frozenset({i}) for i in range(count)]
        # What a state depends on after some steps: until a step adds nothing.
        first = labels = _origins(flatten(started), own)
        before = None
        while labels != before:
            found, before = _origins(flat, [*own, *own, *labels]), labels
            labels = [a | b for a, b in zip(labels, found[count:])]
        together = [*(a | b for a, b in zip(own, found)), *labels]
        pairs = [tuple(sorted(several)[:2]) for several in together if len(several) > 1]
        names = [f"params{jax.tree_util.keystr(p)}" for p, _ in jax.tree.leaves_with_path(params)]
        return Alone(
            flat,
            tuple(names),
            of_state,
            tuple(next(iter(label), None) for label in labels),
            tuple(map(bool, first)),
            pairs[0] if pairs else None,
            _mixed(flat, [*own, *own, *labels]),
            any(e.primitive.name in RANDOM for e in equations(traced.jaxpr)),
        )

    def updated(self, gradients: dict, params: dict, state: dict, shared: dict):
        """The new values of `params` and of `state`, each array by its number. Only the equations
        that these values depend on run.

        gradients: the gradients of `params`.
        state: the arrays of the state that belong to `params`.
        shared: the arrays of the state that belong to no parameter.
        """
        count = len(self.names)
        given = {
            **gradients,
            **{count + i: a for i, a in params.items()},
            **{2 * count + s: a for s, a in (shared | state).items()},
        }
        new = _evaluated(self.flat, [*params, *(count + s for s in state)], given)
        return dict(zip(params, new)), dict(zip(state, new[len(params) :]))


def first_leaves(init: Callable, params) -> Callable[[int, Callable[[int], Any]], Any]:
    """Returns a function that makes the leaves of an optimizer's first state one by one.

    init: `init(params) -> state`.
    params: shapes.

    `leaf(s, parameter)` returns leaf `s`. `parameter(i)` returns parameter i, and is called for the
    parameters alone that the leaf depends on.
    """
    flat = flatten(jax.make_jaxpr(init)(params))

    def leaf(s: int, parameter: Callable[[int], Any]):
        output = flat.outputs[s]
        read = {v for e in leading_to(flat.nodes, [output]) for v in e.reads}
        read |= set() if isinstance(output, Literal) else {output}
        needed = [i for i, v in enumerate(flat.inputs) if v in read]
        return _evaluated(flat, [s], {i: jnp.array(parameter(i)) for i in needed})[0]

    return leaf


def _propagated(flat: Program, labels: Sequence[Labels]) -> dict[int, Labels]:
    """The labels of every value: the labels of all inputs that the value depends on. A loop or a
    conditional counts as one operation, and each of its results depends on all of its operands.

    labels: the labels of the inputs.
    """
    found = dict(zip(flat.inputs, labels, strict=True))
    for e in flat.nodes:
        union = _NONE.union(*(found.get(v, _NONE) for v in e.reads))
        found.update(dict.fromkeys(e.outputs, union))
    return found


def _origins(flat: Program, labels: Sequence[Labels]) -> list[Labels]:
    """The labels of each output."""
    found = _propagated(flat, labels)
    return [_NONE if isinstance(v, Literal) else found.get(v, _NONE) for v in flat.outputs]


def _mixed(flat: Program, labels: Sequence[Labels]) -> int | None:
    """The first label whose arrays are not updated elementwise: an equation takes several values of
    such an array, or a value at another position. None if there is none.
    """
    found, shape_of = _propagated(flat, labels), lambda v: flat.avals[v].shape
    for e in flat.nodes:
        read = [v for v in e.reads if found.get(v) and math.prod(shape_of(v)) > 1]
        shapes = {shape_of(v) for v in (*read, *e.outputs)}
        if read and (len(shapes) > 1 or e.eqn.primitive.name not in _BY_VALUE):
            return min(found[read[0]])
    return None


def _evaluated(flat: Program, wanted: Sequence[int], given: Mapping[int, Any]) -> list:
    """The outputs at the positions `wanted`, from the equations alone that they depend on.

    given: position of an input -> array, for all inputs that these equations read.
    """
    outputs = [flat.outputs[k] for k in wanted]
    arrays = flat.constants | {flat.inputs[k]: a for k, a in given.items()}
    return evaluated(outputs, leading_to(flat.nodes, outputs), arrays)
