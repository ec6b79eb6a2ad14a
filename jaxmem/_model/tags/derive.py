"""The program of a step under any assignment, derived from the trace of the step in which every tag
is recomputed.

A search estimates the bytes of many assignments, and most of an estimate's time was spent on a
trace. The programs of two assignments differ at tags alone. If a tag is kept, the backward reads
the tag of the forward, and computes no value that only this tag depended on. If a tag is encoded,
the backward decodes the codes that the forward made. A scan of the forward stacks the values that
the scan of the backward reads.

A trace does not show where the forward of a block begins and ends. So each tag of a block's
backward is paired with a tag of the forward. The tags of a layer have one order in both, and the
backward runs the layers from the last to the first. Therefore the tags of a backward are the last
tags with their names, shapes and order that belong to no later layer. The alternative is to compare
the inputs and tags that each tag depends on. It does not serve a backward that reads other
variables than its forward, as in a scan over layers.

Only estimates use derived programs. A step is always traced before it is compiled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem._core.assignment import Decisions
from jaxmem._model.tags.named import holds_tag, is_block, is_tag
from jaxmem._model.tags.policy import Policy, policy_for
from jaxmem._model.tags.primitive import divided_tag
from jaxmem._trace.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
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

# What links the backward of a block to its forward: by position of a tag in the backward, the tag's
# position in the forward. For a scan over blocks: the position of the scan that ran the layers
# forward, and the links by position in the body of the backward's scan.
Link = dict[int, int] | tuple[int, dict[int, "Link"]]


class RecomputedStep:
    """A step in which every tag is recomputed.

    program: of the step.
    """

    def __init__(self, program: Jaxpr | ClosedJaxpr):
        self._program = program
        self._links: dict[int, dict[int, Link]] = {}  # by id of a program of the step, by position
        jaxpr = as_closed(program).jaxpr
        self._policies: set[Any] = {e.params["policy"] for e in equations(jaxpr) if is_block(e)}
        self._derivable = self._pair(jaxpr) and all(isinstance(p, Policy) for p in self._policies)

    def under(self, plan: Decisions) -> Jaxpr | ClosedJaxpr | None:
        """The program of the step under a plan.

        None if the program must be traced: if a tag of a backward has no pair, or may have two; if
        the plan divides layers into groups, or keeps values without a tag; and for a policy that is
        combined with another policy.
        """
        own = self._policies
        if not self._derivable or any(plan.groups(p.block) for p in own):
            return None
        decided = {p: policy_for(plan, p.block, layers=p.layers, loop=p.loop) for p in own}
        if any(new.choices is None for new in decided.values()):
            return None
        return on_open(self._program, lambda jaxpr: self._derived(jaxpr, decided))

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
                eqns[position] = with_programs(eqn, lambda inner: self._derived(inner, decided))
        changed = jaxpr.replace(eqns=eqns)
        if not any(isinstance(link, tuple) for link in links.values()):
            return changed
        # The forward scan of layers stacks no result that the backward scan does not read.
        return needed(changed)[0].replace(invars=jaxpr.invars)


def _divided(
    before: list[JaxprEqn], backward: JaxprEqn, link: Link, decided: Mapping[Policy, Policy]
) -> JaxprEqn:
    """The backward of a block, or of a scan over blocks, under other policies. The backward may
    read more results of its forward.

    before: the equations before the backward. The equations of its forward are changed.
    """
    if not isinstance(link, tuple):
        return _divided_block(before, backward, link, decided[backward.params["policy"]])
    at, links = link
    forward = before[at]
    (run,), (again,) = subjaxprs(forward), subjaxprs(backward)
    of_run, of_again = list(run.eqns), list(again.eqns)
    slices: dict[Any, Any] = {}  # by a value of a layer's forward: its slice in the backward
    for position, inner in links.items():
        changed = _divided(of_run, of_again[position], inner, decided)
        own = {id(v) for v in of_again[position].invars}
        reads = [v if id(v) in own else slices.setdefault(v, Var(v.aval)) for v in changed.invars]
        of_again[position] = changed.replace(invars=reads)
    run = run.replace(eqns=of_run, outvars=[*run.outvars, *slices])
    again = again.replace(eqns=of_again, invars=[*again.invars, *slices.values()])
    before[at] = extended_scan(forward, run, ())
    stacks = before[at].outvars[len(forward.outvars) :]
    return extended_scan(backward, again, stacks)


def _divided_block(
    before: list[JaxprEqn], block: JaxprEqn, pairs: dict[int, int], policy: Policy
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


def _link(before: Sequence[JaxprEqn], backward: JaxprEqn, taken: set[int]) -> Link | None:
    """What links a backward, of a block or of a scan over blocks, to its forward; None if a tag has
    no pair, or may have two.

    before: the equations before the backward.
    taken: positions of what belongs to later layers, whose backward runs first. What is linked is
      added.
    """
    if is_block(backward):
        pairs = _pairs(before, backward, taken)
        taken.update(pairs.values() if pairs else ())
        return pairs
    again = as_scan(backward)
    for position in reversed(range(len(before))):
        run = as_scan(before[position])
        if again is None or run is None or position in taken or run.length != again.length:
            continue
        of_layer: set[int] = set()
        links: dict[int, Any] = {
            i: _link(run.jaxpr.eqns, eqn, of_layer)
            for i, eqn in enumerate(again.jaxpr.eqns)
            if any(map(is_block, (eqn, *inside(eqn))))
        }
        if None not in links.values():
            taken.add(position)
            return position, links
    return None


def _pairs(before: Sequence[JaxprEqn], block: JaxprEqn, taken: set[int]) -> dict[int, int] | None:
    """Pairs the tags of a block's backward with the last free tags of the forward that have the
    same names, shapes and order. Arguments as for `_link`.

    The result is None if the forward lacks such tags, or if free tags from the first of them on can
    be paired in another way.
    """
    body = block.params["jaxpr"]
    if any(map(holds_tag, body.eqns)):  # inside a loop of the block
        return None
    wanted, free = _named(body.eqns), [tag for tag in _named(before) if tag[0] not in taken]
    last = _first_in_order(wanted[::-1], free[::-1])[::-1]
    if None in last:
        return None
    is_clear = _first_in_order(wanted, [t for t in free if t[0] >= min(last, default=0)]) == last
    return dict(zip((i for i, _ in wanted), last)) if is_clear else None


def _named(eqns: Sequence[JaxprEqn]) -> list[tuple[int, Any]]:
    """The position of each tag, and what tells it from other tags of a layer."""
    key = lambda e: (e.params["name"], e.outvars[0].aval.shape, e.outvars[0].aval.dtype)
    return [(i, key(eqn)) for i, eqn in enumerate(eqns) if is_tag(eqn)]


def _first_in_order(wanted, among) -> list[Any]:
    """Positions of the first tags of `among` in the order of `wanted`; None for a missing tag."""
    rest = iter(among)
    return [next((i for i, key in rest if key == name), None) for _, name in wanted]
