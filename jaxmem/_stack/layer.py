"""One layer of a stack: its forward with what the backward needs, told apart by where the backward
gets it from.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmem._jax.jaxpr import Flat, FlatEquation, Literal, as_function, flatten, run
from jaxmem._jax.primitives import REPEATED


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """Where the backward gets each leaf of a layer's `jax.vjp` closure from. A tree without leaves.

    ("saved", k): the k-th array saved for the layer. ("own", value): made again from the layer's
    own inputs. ("shared", k): the k-th of what is the same in every layer. ("literal", x): x
    itself.
    """

    tree: Any
    leaves: tuple[tuple[str, Any], ...]
    flat: Flat
    own: tuple[int, ...]  # inputs of `flat` that the backward has: the layer's parameters and key
    common: tuple[int, ...]  # inputs of `flat` that all layers share
    once: tuple[int, ...]  # values of `flat` computed from these alone

    def shared(self, common) -> list:
        """What is the same in every layer, from the values of `common`."""
        known = run(
            _upstream(self.flat, self.once), dict(zip(self.common, common)) | self.flat.constants
        )
        return [known[v] for v in self.once]

    def closure(self, own, saved, shared):
        """The `jax.vjp` closure of one layer."""
        again = _upstream(self.flat, [value for how, value in self.leaves if how == "own"])
        known = run(again, dict(zip(self.own, own)) | self.flat.constants)
        take = {
            "saved": lambda k: saved[k],
            "own": known.get,
            "shared": lambda k: shared[k],
            "literal": lambda x: x,
        }
        return jax.tree.unflatten(self.tree, [take[how](what) for how, what in self.leaves])


def forward(layer: Callable, own, x, common) -> tuple[Any, list, Residuals]:
    """One layer's output, what is to be saved of it, and how the backward goes on from there.

    `layer(own, x, common)`; `own`, of this layer, and `common`, of all, are pairs: what is
    differentiated, and the rest. The closure takes the output's cotangent to those of `own[0]`, `x`
    and `common[0]`.
    """
    trees: dict[str, Any] = {}

    def traced(own, common, x):
        split = lambda d, x, c: layer((d, own[1]), x, (c, common[1]))
        out, pull = jax.vjp(split, own[0], x, common[0])
        leaves, trees["pull"] = jax.tree.flatten(pull)
        out, trees["out"] = jax.tree.flatten(out)
        return out, leaves

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


def _origins(flat: Flat, leaves, mine, common):
    """Where each leaf comes from; then which leaves are saved, and what is computed once,
    each without repeats.
    """
    again = _computed(flat, mine, lambda e: e.eqn.primitive.name in REPEATED)
    same = _computed(flat, common, lambda e: not e.eqn.effects)
    saved: dict[int, int] = {}
    once: dict[int, int] = {}
    first: list[int] = []
    found = []
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Literal):
            found.append(("literal", leaf.val))
        elif leaf in same:
            found.append(("shared", once.setdefault(leaf, len(once))))
        elif leaf in again:
            found.append(("own", leaf))
        else:
            if leaf not in saved:
                first.append(k)
            found.append(("saved", saved.setdefault(leaf, len(saved))))
    return tuple(found), first, tuple(once)


def _computed(flat: Flat, inputs, passes: Callable[[FlatEquation], bool]) -> set[int]:
    """The values that follow from `inputs` and constants by equations that pass."""
    found = {*inputs, *flat.constants}
    for e in flat.equations:
        if passes(e) and found.issuperset(e.reads):
            found.update(e.outputs)
    return found


def _upstream(flat: Flat, values) -> list[FlatEquation]:
    """The equations that make `values`, in order."""
    wanted, chosen = set(values), []
    for e in reversed(flat.equations):
        if wanted.intersection(e.outputs):
            chosen.append(e)
            wanted.update(e.reads)
    return chosen[::-1]
