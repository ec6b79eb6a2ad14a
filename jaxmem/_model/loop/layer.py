"""One layer of a stack: runs its forward, and decides which of the tensors that its backward needs
are saved, and which the backward gets without saving them.

A layer's `jax.vjp` closure is a tree whose leaves are all arrays that the backward reads. The stack
keeps these leaves, and distinguishes them in the jaxpr of the layer's forward, for which the block
is traced once:

- A leaf that follows from the layer's own parameters by casts and views is computed again. From
  frozen parameters, it is computed again by any operation but a product: weights that are stored in
  4 or 8 bits are decoded again, and not saved in the dtype of compute.
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

from jaxmem._trace.jaxpr import Literal, as_function, matmul_flops
from jaxmem._trace.primitives import REPEATED
from jaxmem._trace.rewrite import Program, evaluated, flatten, leading_to, made_of, run


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """The source of each leaf of a layer's `jax.vjp` closure in the backward. It is static: a tree
    without leaves, which passes through `jax.custom_vjp` together with the saved arrays.

    tree: the structure of the closure.
    leaves: a pair for each leaf of the closure. ("saved", k): the k-th array saved for the layer.
      ("own", value): computed again from the layer's own inputs. ("shared", k): the k-th of the
      arrays that are equal in all layers. ("literal", x): x itself.
    flat: the layer's forward with numbered values, by which values are computed again.
    own: the inputs of `flat` that the backward has: the layer's parameters and key.
    common: the inputs of `flat` that all layers share.
    once: the values of `flat` that depend only on inputs that all layers share.
    """

    tree: Any
    leaves: tuple[tuple[str, Any], ...]
    flat: Program
    own: tuple[int, ...]
    common: tuple[int, ...]
    once: tuple[int, ...]

    def shared(self, common) -> list:
        """Computes the arrays that are equal in all layers from the leaves of `common`: once,
        outside the loop over layers.
        """
        values = dict(zip(self.common, common)) | self.flat.constants
        return evaluated(self.once, leading_to(self.flat.nodes, self.once), values)

    def closure(self, own, saved, shared):
        """Rebuilds the `jax.vjp` closure of one layer.

        own: the leaves of the layer's parameters and key, read again from the stacked arrays.
        saved: the arrays that the forward saved for this layer.
        shared: the arrays that `self.shared` returned.
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


def forward(layer: Callable, own, x, common, frozen: int = 0) -> tuple[Any, list, Residuals]:
    """Returns one layer's output, the arrays to save for the layer, and the `Residuals` that
    rebuild the layer's `jax.vjp` closure from them.

    The closure maps the output's cotangent to the cotangents of `own[0]`, `x` and `common[0]`.

    layer: `layer(own, x, common)`, under the policy that decides about its tensors.
    own: this layer's arrays, as a pair of the differentiated arrays and the other arrays.
    x: the input of the layer.
    common: the arrays that all layers read, as such a pair.
    frozen: the number of frozen parameters, the first leaves of `own[1]`.
    """
    trees: dict[str, Any] = {}  # the structures of the output and the closure, found by the trace

    def traced(own, common, x):
        split = lambda d, x, c: layer((d, own[1]), x, (c, common[1]))
        out, pull = jax.vjp(split, own[0], x, common[0])
        leaves, trees["pull"] = jax.tree.flatten(pull)
        out, trees["out"] = jax.tree.flatten(out)
        return out, leaves

    # The trace shows the source of each leaf of the closure, and is then evaluated. Its inputs are
    # the leaves of `own`, `common` and `x`, in this order. Its outputs are the leaves of the
    # layer's output, and then the leaves of the closure.
    arguments = jax.tree.leaves((own, common, x))
    closed = jax.make_jaxpr(traced)(own, common, x)
    values = as_function(closed)(*arguments)
    outputs = trees["out"].num_leaves
    flat = flatten(closed)
    mine = tuple(flat.inputs[: len(jax.tree.leaves(own))])
    shared = tuple(flat.inputs[len(mine) : len(mine) + len(jax.tree.leaves(common))])
    first = len(jax.tree.leaves(own[0]))
    still = mine[first : first + frozen]
    leaves, saved, once = _origins(flat, flat.outputs[outputs:], mine, shared, still)
    residuals = Residuals(trees["pull"], leaves, flat, mine, shared, once)
    return (
        jax.tree.unflatten(trees["out"], values[:outputs]),
        [values[outputs + k] for k in saved],
        residuals,
    )


def _origins(flat: Program, leaves, mine, common, frozen):
    """Decides the source of each leaf of the closure in the backward.

    Returns a pair for each leaf, as in `Residuals.leaves`; the positions of the saved leaves; and
    the values of `flat` that are computed once for all layers. A value that is two leaves of the
    closure is saved, or computed, once.

    flat: the layer's forward and its closure, traced.
    leaves: the closure's leaves, as values of `flat` or literals.
    mine: the inputs of `flat` that are the layer's parameters and key.
    common: the inputs of `flat` that all layers share.
    frozen: the inputs of `flat` that are frozen parameters.
    """
    # Only casts and views of a layer's own inputs are computed again: they cost less than a stacked
    # copy. Arrays that all layers share are computed once, by any operation without a side effect.
    decodes = lambda e: not e.eqn.effects and not matmul_flops(e.eqn)[0]
    computed = lambda inputs, passes: made_of({*inputs, *flat.constants}, flat.nodes, passes)
    decoded = computed(frozen, decodes) if frozen else set()
    again = computed({*mine, *decoded}, lambda e: e.eqn.primitive.name in REPEATED)
    same = computed(common, lambda e: not e.eqn.effects)
    saved: dict[int, int] = {}  # value -> its index among the saved arrays
    once: dict[int, int] = {}  # value -> its index among values computed once
    first: list[int] = []  # for each saved array, the first leaf that is it
    found = []
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Literal):
            found.append(("literal", leaf.val))
        elif leaf in same:  # before `again`: a value that depends on constants only is in both
            found.append(("shared", once.setdefault(leaf, len(once))))
        elif leaf in again:
            found.append(("own", leaf))
        else:
            if leaf not in saved:
                first.append(k)
            found.append(("saved", saved.setdefault(leaf, len(saved))))
    return tuple(found), first, tuple(once)
