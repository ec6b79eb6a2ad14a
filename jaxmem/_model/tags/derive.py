"""The program of a step under any assignment, derived from the trace of the step in which every tag
is recomputed.

A search estimates the bytes of many assignments. A step whose layers a Python loop repeats takes
seconds to trace, and a program is derived in a fraction of a second. The programs of two
assignments differ at tags alone. If a tag is kept, the backward reads the tag of the forward, and
computes no value that only this tag depended on. If a tag is encoded, the backward decodes the
codes that the forward made.

A trace does not show where the forward of a block begins and ends. So each tag of a block's
backward is paired with a tag of the forward: with the tag of the same name that depends on the same
tags and on the same inputs of the block. The operations between tags are not compared, because the
derivative rule of a function may compute the function by other operations.

Only estimates use derived programs. A step is always traced before it is compiled.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmem._core.assignment import Decisions
from jaxmem._model.tags.named import holds_tag, is_block, is_tag
from jaxmem._model.tags.policy import Policy, policy_for
from jaxmem._model.tags.primitive import divided_tag
from jaxmem._trace.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    as_closed,
    inside,
    needed,
    on_open,
    subjaxprs,
    with_programs,
)

Pairs = dict[int, int]  # by position of a tag in a block's backward: position in the forward


class RecomputedStep:
    """A step in which every tag is recomputed.

    program: of the step.
    """

    def __init__(self, program: Jaxpr | ClosedJaxpr):
        self._program = program
        # By id of a program of the step: by position of a block's backward, its pairs of tags.
        self._pairs: dict[int, dict[int, Pairs]] = {}
        self._policies: set[Any] = set()
        paired = self._pair(as_closed(program).jaxpr)
        self._is_derivable = paired and all(isinstance(p, Policy) for p in self._policies)

    def under(self, plan: Decisions) -> Jaxpr | ClosedJaxpr | None:
        """The program of the step under a plan.

        None if the program must be traced: if the forward and the backward of a block are in two
        loops, as in a scan over layers; if the plan divides layers into groups, or keeps values
        without a tag; and for a policy that is combined with another policy.
        """
        if not self._is_derivable or any(plan.groups(p.block) for p in self._policies):
            return None
        policy = lambda own: policy_for(plan, own.block, layers=own.layers, spans=own.spans)
        decided = {own: policy(own) for own in self._policies}
        if any(new.choices is None for new in decided.values()):
            return None
        return on_open(self._program, functools.partial(self._derived, decided=decided))

    def _pair(self, jaxpr: Jaxpr) -> bool:
        """Pairs the tags of a program and of its inner programs. Returns whether all have pairs."""
        taken: set[int] = set()
        for position, eqn in enumerate(jaxpr.eqns):
            if is_block(eqn):
                pairs = _pairs(jaxpr.eqns[:position], eqn, taken)
                if pairs is None:
                    return False
                taken.update(pairs.values())
                self._pairs.setdefault(id(jaxpr), {})[position] = pairs
                self._policies.add(eqn.params["policy"])
            elif not all(map(self._pair, subjaxprs(eqn))):
                return False
        return True

    def _derived(self, jaxpr: Jaxpr, decided: Mapping[Policy, Policy]) -> Jaxpr:
        """A program of the step under other policies."""
        eqns = list(jaxpr.eqns)
        for position, eqn in enumerate(jaxpr.eqns):
            if is_block(eqn):
                pairs = self._pairs[id(jaxpr)][position]
                _divide(eqns, position, pairs, decided[eqn.params["policy"]])
            elif any(map(is_block, inside(eqn))):
                derived = functools.partial(self._derived, decided=decided)
                eqns[position] = with_programs(eqn, derived)
        return jaxpr.replace(eqns=eqns)


def _divide(eqns: list[JaxprEqn], position: int, pairs: Pairs, policy: Policy) -> None:
    """Changes the backward of a block, and the tags of its forward, as a policy decides.

    eqns: the equations of a program, which are changed.
    position: of the block's backward.
    """
    block = eqns[position]
    body = block.params["jaxpr"]
    staged_at: dict[int, list[JaxprEqn]] = {}
    saved: list[tuple[Any, Any]] = []  # variables of the backward, with variables of the forward
    for of_forward, of_backward in sorted((f, b) for b, f in pairs.items()):
        (result,), forward = body.eqns[of_backward].outvars, eqns[of_forward]
        known, staged, _, _, codes = divided_tag(policy, [False], [True], forward)
        if staged is None:
            staged_at[of_backward] = []
            saved.append((result, forward.outvars[0]))
        elif known is not None and codes:
            eqns[of_forward] = known
            staged_at[of_backward] = [staged.replace(outvars=[result])]
            saved += zip(codes, codes)
    if not saved:
        return
    inputs, operands = zip(*saved)
    staged = [e for i, eqn in enumerate(body.eqns) for e in staged_at.get(i, [eqn])]
    changed, used = needed(body.replace(eqns=staged, invars=[*inputs, *body.invars]))
    read = [v for v, is_read in zip((*operands, *block.invars), used) if is_read]
    eqns[position] = block.replace(invars=read, params=block.params | {"jaxpr": changed})


def _pairs(before: Sequence[JaxprEqn], block: JaxprEqn, taken: set[int]) -> Pairs | None:
    """Pairs the tags of a block's backward with the tags of its forward; None if one has no pair.

    before: the equations before the backward.
    taken: positions of tags that belong to other blocks.
    """
    body = block.params["jaxpr"]
    if any(map(holds_tag, body.eqns)):  # inside a loop of the block
        return None
    numbers: dict[Any, int] = {}
    number: Callable[[Any], int] = lambda key: numbers.setdefault(key, len(numbers))
    numbered = [frozenset(() if isinstance(v, Literal) else (number(v),)) for v in block.invars]
    own = dict(zip(body.invars, numbered))
    outer = {v: n for v, n in zip(block.invars, numbered) if not isinstance(v, Literal)}
    of_backward, of_forward = _tags(body.eqns, own, number), _tags(before, outer, number)
    free = {p: key for p, key in of_forward.items() if p not in taken}
    candidates = {tag: [p for p in free if free[p] == key] for tag, key in of_backward.items()}
    pairs: Pairs = {}
    # Tags of several blocks may depend on the same inputs, such as masks of dropout. The tags of
    # a block are near each other, and have the same order in both programs.
    for tag in sorted(candidates, key=lambda tag: (len(candidates[tag]), tag)):
        first = max((f for b, f in pairs.items() if b < tag), default=-1)
        last = min((f for b, f in pairs.items() if b > tag), default=len(before))
        found = [p for p in candidates[tag] if first < p < last]
        if not found:
            return None
        pairs[tag] = found[-1] if first < 0 else found[0]
    return pairs


def _tags(
    eqns: Sequence[JaxprEqn], known: Mapping[Any, frozenset[int]], number: Callable[[Any], int]
) -> dict[int, int]:
    """By position of a tag: a number of the tag's name and of the tags and inputs that it depends
    on. Tags that depend on more than the inputs are left out.

    known: the inputs, each with its number.
    number: numbers the pairs of a name and of numbers.
    """
    sources, found = dict(known), {}
    for position, eqn in enumerate(eqns):
        reads = [v for v in eqn.invars if not isinstance(v, Literal)]
        if is_block(eqn) or not all(v in sources for v in reads):
            continue
        here = frozenset().union(*(sources[v] for v in reads))
        if is_tag(eqn):
            found[position] = number((eqn.params["name"], here))
            here = frozenset((found[position],))
        for v in eqn.outvars:
            sources.setdefault(v, here)  # an input of the block may be made from other inputs
    return found
