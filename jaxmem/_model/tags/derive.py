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

import dataclasses
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
    Var,
    as_closed,
    as_scan,
    equations,
    extended_scan,
    inside,
    needed,
    on_open,
    subjaxprs,
    with_programs,
)


@dataclasses.dataclass(frozen=True)
class Loops:
    """The scan that runs layers backward, and the scan that ran them forward.

    forward: the position of the scan that ran them forward.
    links: what links the equations of both bodies, as for a step.
    """

    forward: int
    links: "Links"


Pairs = dict[int, int]  # by position of a tag in a block's backward: position in the forward
# By position of a backward, of a block or of a scan over blocks: what links it to its forward.
Links = dict[int, Pairs | Loops]


class RecomputedStep:
    """A step in which every tag is recomputed.

    program: of the step.
    """

    def __init__(self, program: Jaxpr | ClosedJaxpr):
        self._program = program
        self._links: dict[int, Links] = {}  # by id of a program of the step
        self._policies: set[Any] = {
            e.params["policy"] for e in equations(as_closed(program).jaxpr) if is_block(e)
        }
        paired = self._pair(as_closed(program).jaxpr)
        self._is_derivable = paired and all(isinstance(p, Policy) for p in self._policies)

    def under(self, plan: Decisions) -> Jaxpr | ClosedJaxpr | None:
        """The program of the step under a plan.

        None if the program must be traced: if a tag of a backward has no pair, or may have two; if
        the plan divides layers into groups, or keeps values without a tag; and for a policy that is
        combined with another policy.
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
            if not is_block(eqn) and all(map(self._pair, subjaxprs(eqn))):
                continue
            link = _link(jaxpr.eqns[:position], eqn, taken)
            if link is None:
                return False
            self._links.setdefault(id(jaxpr), {})[position] = link
        return True

    def _derived(self, jaxpr: Jaxpr, decided: Mapping[Policy, Policy]) -> Jaxpr:
        """A program of the step under other policies."""
        eqns, links = list(jaxpr.eqns), self._links.get(id(jaxpr), {})
        for position, eqn in enumerate(jaxpr.eqns):
            if position in links:
                eqns[position] = _divided(eqns, eqn, links[position], decided)
            elif any(map(is_block, inside(eqn))):
                derived = functools.partial(self._derived, decided=decided)
                eqns[position] = with_programs(eqn, derived)
        changed = jaxpr.replace(eqns=eqns)
        if not any(isinstance(link, Loops) for link in links.values()):
            return changed
        # The forward scan of layers stacks no result that the backward scan does not read.
        return needed(changed)[0].replace(invars=jaxpr.invars)


def _divided(
    before: list[JaxprEqn],
    backward: JaxprEqn,
    link: Pairs | Loops,
    decided: Mapping[Policy, Policy],
) -> JaxprEqn:
    """The backward of a block, or of a scan over blocks, under other policies. The backward may
    read more results of its forward.

    before: the equations before the backward. The equations of its forward are changed.
    """
    if not isinstance(link, Loops):
        return _divided_block(before, backward, link, decided[backward.params["policy"]])
    forward = before[link.forward]
    (run,), (again,) = subjaxprs(forward), subjaxprs(backward)
    of_run, of_again = list(run.eqns), list(again.eqns)
    slices: dict[Any, Any] = {}  # by a value of a layer's forward: its slice in the backward
    for position, inner in link.links.items():
        changed = _divided(of_run, of_again[position], inner, decided)
        own = {id(v) for v in of_again[position].invars}
        reads = [v if id(v) in own else slices.setdefault(v, Var(v.aval)) for v in changed.invars]
        of_again[position] = changed.replace(invars=reads)
    run = run.replace(eqns=of_run, outvars=[*run.outvars, *slices])
    again = again.replace(eqns=of_again, invars=[*again.invars, *slices.values()])
    before[link.forward] = extended_scan(forward, run, ())
    stacks = before[link.forward].outvars[len(forward.outvars) :]
    return extended_scan(backward, again, stacks)


def _divided_block(
    before: list[JaxprEqn], block: JaxprEqn, pairs: Pairs, policy: Policy
) -> JaxprEqn:
    """The backward of a block under another policy. Arguments as for `_divided`."""
    body = block.params["jaxpr"]
    staged_at: dict[int, list[JaxprEqn]] = {}
    saved: list[tuple[Any, Any]] = []  # variables of the backward, with variables of the forward
    for of_forward, of_backward in sorted((f, b) for b, f in pairs.items()):
        (result,), forward = body.eqns[of_backward].outvars, before[of_forward]
        known, staged, _, _, codes = divided_tag(policy, [False], [True], forward)
        if staged is None:
            staged_at[of_backward] = []
            saved.append((result, forward.outvars[0]))
        elif known is not None and codes:
            before[of_forward] = known
            staged_at[of_backward] = [staged.replace(outvars=[result])]
            saved += zip(codes, codes)
    if not saved:
        return block
    inputs, operands = zip(*saved)
    staged = [e for i, eqn in enumerate(body.eqns) for e in staged_at.get(i, [eqn])]
    changed, used = needed(body.replace(eqns=staged, invars=[*inputs, *body.invars]))
    read = [v for v, is_read in zip((*operands, *block.invars), used) if is_read]
    return block.replace(invars=read, params=block.params | {"jaxpr": changed})


def _link(before: Sequence[JaxprEqn], backward: JaxprEqn, taken: set[int]) -> Pairs | Loops | None:
    """What links a backward, of a block or of a scan over blocks, to its forward; None if a tag has
    no pair.

    before: the equations before the backward.
    taken: positions of what belongs to other backwards; what is linked is added.
    """
    if is_block(backward):
        pairs = _pairs(before, backward, taken)
        pairs = _pairs_in_order(before, backward, taken) if pairs is None else pairs
        taken.update(pairs.values() if pairs else ())
        return pairs
    again = as_scan(backward)
    for position in reversed(range(len(before))):
        run = as_scan(before[position])
        if again is None or run is None or position in taken or run.length != again.length:
            continue
        of_layer: set[int] = set()
        links = {
            i: _link(run.jaxpr.eqns, eqn, of_layer)
            for i, eqn in enumerate(again.jaxpr.eqns)
            if any(map(is_block, (eqn, *inside(eqn))))
        }
        if None not in links.values():
            taken.add(position)
            return Loops(position, links)
    return None


def _pairs_in_order(before: Sequence[JaxprEqn], block: JaxprEqn, taken: set[int]) -> Pairs | None:
    """Pairs the tags of a block's backward with the last tags of the forward that have the same
    names, shapes and order. Arguments as for `_pairs`.

    This serves programs in which a block's backward makes its inputs again, or reads their slices.
    None if there are no such tags, or if they can be chosen in two ways.
    """
    body = block.params["jaxpr"]
    if any(map(holds_tag, body.eqns)):
        return None
    # The backward runs the layers from the last to the first.
    of_backward, of_forward = _named(body.eqns), _named(before[: min(taken, default=len(before))])
    last = _first_in_order(of_backward[::-1], of_forward[::-1])
    if last is None:
        return None
    of_layer = [(i, key) for i, key in of_forward if i >= min(last, default=0)]
    if _first_in_order(of_backward, of_layer) != last[::-1]:
        return None
    return {b: f for (b, _), f in zip(of_backward, last[::-1])}


def _named(eqns: Sequence[JaxprEqn]) -> list[tuple[int, Any]]:
    """The position of each tag, and what tells it from other tags of a layer."""
    key = lambda e: (e.params["name"], e.outvars[0].aval.shape, e.outvars[0].aval.dtype)
    return [(i, key(eqn)) for i, eqn in enumerate(eqns) if is_tag(eqn)]


def _first_in_order(wanted, among) -> list[int] | None:
    """The positions of the first tags of `among` that have the order of `wanted`; None if none."""
    rest = iter(among)
    found = [next((i for i, key in rest if key == name), None) for _, name in wanted]
    return None if None in found else found


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
