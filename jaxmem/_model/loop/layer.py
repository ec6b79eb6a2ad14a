"""One layer of a stack: runs its forward, and decides which of the tensors that its backward needs
are saved, and which the backward gets without saving them.

A layer's `jax.vjp` closure is a tree whose leaves are all arrays that the backward reads. The stack
keeps these leaves, and distinguishes them in the jaxpr of the layer's forward, for which the block
is traced once:

- A leaf that follows from the layer's own parameters by casts and views is computed again.
- A leaf that does not differ by layer is computed once for all layers.
- All other leaves are stacked.

The alternative is to stack every leaf. The loop would then copy the layer's parameters, and the
arrays that all layers share, once for each layer.

Values that the block closes over are passed as explicit arguments (`arguments.py`), because
`jax.custom_vjp` does not track closed-over tracers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmem._trace.jaxpr import Literal, as_function
from jaxmem._trace.primitives import REPEATED
from jaxmem._trace.rewrite import Node, Program, flatten, leading_to, run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """Where the backward gets each leaf of a layer's `jax.vjp` closure from. It is static: a tree
    without leaves, so that it passes through `jax.custom_vjp` beside the saved arrays.

    tree: the structure of the closure.
    leaves: a pair for each of its leaves. ("saved", k): the k-th array saved for the layer. ("own",
      value): made again from the layer's own inputs. ("shared", k): the k-th of what is the same in
      every layer. ("literal", x): x itself.
    flat: the layer's forward, whose values are numbered; it says how to make values again.
    """

    tree: Any
    leaves: tuple[tuple[str, Any], ...]
    flat: Program
    own: tuple[int, ...]  # inputs of `flat` that the backward has: the layer's parameters and key
    common: tuple[int, ...]  # inputs of `flat` that all layers share
    once: tuple[int, ...]  # values of `flat` computed from these alone

    def shared(self, common) -> list:
        """Computes what is the same in every layer, from the leaves of `common`: once, outside the
        loop over layers.
        """
        known = run(
            leading_to(self.flat.nodes, self.once),
            dict(zip(self.common, common)) | self.flat.constants,
        )
        return [known[v] for v in self.once]

    def closure(self, own, saved, shared):
        """Rebuilds the `jax.vjp` closure of one layer.

        own: the leaves of the layer's parameters and key, read again from the stacked arrays.
        saved: what the forward saved of this layer.
        shared: what `self.shared` returned.
        """
        again = leading_to(self.flat.nodes, [value for how, value in self.leaves if how == "own"])
        known = run(again, dict(zip(self.own, own)) | self.flat.constants)
        take = {
            "saved": lambda k: saved[k],
            "own": known.get,
            "shared": lambda k: shared[k],
            "literal": lambda x: x,
        }
        return jax.tree.unflatten(self.tree, [take[how](what) for how, what in self.leaves])


def forward(layer: Callable, own, x, common) -> tuple[Any, list, Residuals]:
    """Returns one layer's output, the arrays to save of it, and how the backward goes on from them.

    The closure that can be rebuilt takes the output's cotangent to those of `own[0]`, `x` and
    `common[0]`.

    layer: `layer(own, x, common)`, under the policy that says what it saves.
    own: this layer's arrays, as a pair: what is differentiated, and the rest.
    x: what enters the layer.
    common: the arrays that all layers read, as such a pair.
    """
    trees: dict[str, Any] = {}  # the structures of the output and the closure, found by the trace

    def traced(own, common, x):
        split = lambda d, x, c: layer((d, own[1]), x, (c, common[1]))
        out, pull = jax.vjp(split, own[0], x, common[0])
        leaves, trees["pull"] = jax.tree.flatten(pull)
        out, trees["out"] = jax.tree.flatten(out)
        return out, leaves

    # The trace is needed to tell where each leaf of the closure comes from; then it is evaluated.
    # Its inputs are the leaves of `own`, `common` and `x` in this order, its outputs those of the
    # layer's output and then those of the closure.
    arguments = jax.tree.leaves((own, common, x))
    closed = jax.make_jaxpr(traced)(own, common, x)
    values = as_function(closed)(*arguments)
    outputs = trees["out"].num_leaves
    flat = flatten(closed)
    mine = tuple(flat.inputs[: len(jax.tree.leaves(own))])
    shared = tuple(flat.inputs[len(mine) : len(mine) + len(jax.tree.leaves(common))])
    leaves, saved, once = _origins(flat, flat.outputs[outputs:], mine, shared)
    residuals = Residuals(trees["pull"], leaves, flat, mine, shared, once)
    return (
        jax.tree.unflatten(trees["out"], values[:outputs]),
        [values[outputs + k] for k in saved],
        residuals,
    )


def _origins(flat: Program, leaves, mine, common):
    """Decides where the backward gets each leaf of the closure from.

    Returns a pair for each leaf, as in `Residuals.leaves`; the positions among the leaves of those
    that are saved; and the values of `flat` that are computed once for all layers. A value that the
    closure holds twice is in each of these lists once.

    flat: the layer's forward and its closure, traced.
    leaves: the closure's leaves, as values of `flat` or literals.
    mine: the inputs of `flat` that are the layer's parameters and key.
    common: the inputs of `flat` that all layers share.
    """
    # From a layer's own inputs only casts and views are repeated: they cost less than a stacked
    # copy. What all layers share is computed once, so there anything without a side effect will do.
    again = _computed(flat, mine, lambda e: e.eqn.primitive.name in REPEATED)
    same = _computed(flat, common, lambda e: not e.eqn.effects)
    saved: dict[int, int] = {}  # value -> its place among the saved arrays
    once: dict[int, int] = {}  # value -> its place among what is computed once
    first: list[int] = []  # for each saved array, the first leaf that is it
    found = []
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Literal):
            found.append(("literal", leaf.val))
        elif leaf in same:  # asked before `again`: what follows from constants alone is in both
            found.append(("shared", once.setdefault(leaf, len(once))))
        elif leaf in again:
            found.append(("own", leaf))
        else:
            if leaf not in saved:
                first.append(k)
            found.append(("saved", saved.setdefault(leaf, len(saved))))
    return tuple(found), first, tuple(once)


def _computed(flat: Program, inputs, passes: Callable[[Node], bool]) -> set[int]:
    """The values that follow from `inputs` and constants by equations for which `passes` is true,
    the inputs and constants included.
    """
    found = {*inputs, *flat.constants}
    for e in flat.nodes:
        if passes(e) and found.issuperset(e.reads):
            found.update(e.outputs)
    return found
