"""Finds the blocks of a traced step: `jax.checkpoint` regions under our policy, in the backward
pass.

The step is traced with every tag recomputed. Then a block's backward equation reads the block's
inputs and the cotangents of its outputs (last), repeats the forward, and goes on to the derivative:
its jaxpr is the whole graph.

A step that clips by the global norm runs the layers' backward twice over the same saved tensors.
The second loop over these tensors is no block of its own: `Instance.backwards` counts it.

If a block begins and ends in one iteration of an outer loop, its saved tensors are live in that
iteration alone. So microbatches that run one after the other count once. A streamed step, whose
last microbatch is a program of its own, has the same profile as a resident step.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxmem._cost.blocks.policies import refuse_ambiguous, saved_names, warn_of_writes
from jaxmem._model.tags.named import (
    forward_names,
    holds_tag,
    is_block,
    is_tag,
    names_in,
    policies_of,
)
from jaxmem._trace.arguments import on_host
from jaxmem._trace.jaxpr import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Scan,
    Var,
    as_scan,
    call_body,
    is_reference,
    matmul_flops,
    subjaxprs,
)
from jaxmem._trace.primitives import INDICES, VIEWS
from jaxmem._trace.rewrite import Program, flatten, leading_to

# Applied to a value that is always in memory, these make values that are not saved: the backward
# makes them again. A device gathers again the parameters of a layer if it has a part of them.
FREELY = VIEWS | {"all_gather", "all_gather_invariant"}
BARRIER = "optimization_barrier"
MOST_INDICES = 4096  # elements up to which an array may be a loop's counters or its layers' keys


@dataclasses.dataclass(frozen=True)
class Instance:
    """One block equation of the backward pass. Values are numbers of `flat`.

    label: the policy's block label.
    flat: the equation's jaxpr with its calls inlined: the forward, then the derivative.
    cotangents: the inputs that are cotangents of the block's outputs.
    boundary: the index of the first equation of the derivative; those before repeat the forward.
    charged: the inputs that cost memory if the backward reads them without recomputation.
    layers: for how many runs of the equation the saved tensors are alive at the same time.
    home: the id of the loop body in which all of these tensors begin and end, None outside loops.
      Loop bodies run one after the other, such as the bodies of two microbatches.
    loops: the number of nested loops that make so many layers.
    runs: how often the equation runs in a step.
    sharded: whether shapes are one device's already, as inside `jax.shard_map`.
    divisible: the number of layers in the group that a plan may divide; 0 if it may not.
    backwards: how often the backward runs for each forward.
    stacks: the stacked arrays of saved tensors that the equation reads; empty outside loops.
    loop: as for `Policy`.
    body: the id of the innermost jaxpr that holds the equation.
    forward_flops: FLOPs of the matrix products of the block's forward pass. The backward pass of
      the block repeats only a part of it: no derivative needs the block's last product. 0 if
      several forward passes of the label differ.
    """

    label: str
    flat: Program
    cotangents: frozenset[int]
    boundary: int
    charged: tuple[int, ...]
    layers: int
    home: int | None
    loops: int
    runs: int
    sharded: bool
    divisible: int
    loop: str
    body: int
    backwards: int = 1
    stacks: frozenset[Var] = frozenset()
    forward_flops: float = 0.0

    @property
    def stack(self) -> int:
        """Number of layers in the stacked array that saves a tensor of the block; 0 if no loop
        stacks the tensor.
        """
        return self.layers if self.loops else 0

    @property
    def once_more(self) -> "Instance":
        """The instance with one more backward."""
        return dataclasses.replace(self, backwards=self.backwards + 1)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a step's jaxpr.

    instances: the block equations of the backward pass, in program order.
    tag_names: names of every tag and `checkpoint_name` of the step, inside and outside blocks.
    saved_names: names of the tags that a policy saves with which a block's policy is combined.
    plain_labels: labels of the blocks outside the backward pass: forward passes of blocks, and
      blocks without a gradient.
    """

    instances: list[Instance]
    tag_names: set[str]
    saved_names: set[str]
    plain_labels: set[str]

    @property
    def idle(self) -> tuple[str, ...]:
        """Labels of blocks that no gradient runs through."""
        return tuple(sorted(self.plain_labels - {i.label for i in self.instances}))


def find_blocks(jaxpr: Jaxpr) -> Blocks:
    """Walks a step's jaxpr, its loops and calls included, and collects its blocks.

    The origin of an input of a block's backward decides whether the input costs memory: "free" is
    always in memory (arguments, constants, and views of these), "stacked" was saved by a loop over
    layers, "carry" is carried by a loop, "local" is anything else.

    Raises TagError for a checkpoint whose policy hides a jaxmem policy, or combines several.
    """
    refuse_ambiguous(jaxpr)
    warn_of_writes(jaxpr)
    instances: list[Instance] = []
    plain_labels: set[str] = set()
    flops: dict[str, set[float]] = {}
    # (trip count, tags, FLOPs of an iteration) of loops that hold tags outside every block. Such a
    # loop is the forward of a block whose checkpoint JAX opened.
    opened: list[tuple[int, set[str], float]] = []
    names = forward_names(jaxpr)

    def walk(
        jaxpr: Jaxpr,
        origin: dict[Var, str],
        frames: tuple,
        sharded: bool,
        stacks: dict[Var, Var],
    ) -> list[str]:
        """Collects the instances in `jaxpr`; returns where its outputs come from.

        origin: where the inputs of `jaxpr` come from.
        frames: the jaxprs round this one, outermost first, each with the trip count of the loop
          that leads on from it (1 where it is no loop).
        sharded: whether a `shard_map` is among them.
        stacks: the stacked array of saved tensors that each input of `jaxpr` is a layer of.
        """
        origin = dict.fromkeys(jaxpr.constvars, "free") | origin
        free = lambda v: isinstance(v, Literal) or is_reference(v.aval)
        here = lambda v: "free" if free(v) else origin.get(v, "local")
        stack_of = lambda v: None if isinstance(v, Literal) else stacks.get(v)
        # By variable: the equation that makes it, the first one that reads it, and how many blocks
        # read it.
        variables = lambda eqn: [v for v in eqn.invars if not isinstance(v, Literal)]
        defined = {o: i for i, e in enumerate(jaxpr.eqns) for o in e.outvars}
        first_use = {v: i for i, e in reversed([*enumerate(jaxpr.eqns)]) for v in variables(e)}
        again = _repeated(jaxpr, defined)
        block_uses = Counter(
            v
            for i, e in enumerate(jaxpr.eqns)
            if is_block(e) and i not in again
            for v in set(variables(e))
        )
        position: dict[int, int] = {}  # of an equation's instance in `instances`
        for i, eqn in enumerate(jaxpr.eqns):
            # A slice is a view of its operand, for indices of any origin.
            viewed = eqn.invars[:1] if eqn.primitive.name == "dynamic_slice" else eqn.invars
            sizes = [math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars]
            small = max(sizes, default=0) <= MOST_INDICES  # as a counter of layers is
            cheap = eqn.primitive.name in FREELY or (eqn.primitive.name in INDICES and small)
            if cheap and all(here(v) == "free" for v in viewed):
                origin.update(dict.fromkeys(eqn.outvars, "free"))
            if eqn.primitive.name == BARRIER:  # each result is one of the operands
                pairs = zip(eqn.invars, eqn.outvars)
                origin.update({o: "free" for v, o in pairs if here(v) == "free"})
            if is_block(eqn):
                if not eqn.params.get("differentiated"):  # a forward: its backward comes later
                    for policy in policies_of(eqn):
                        plain_labels.add(policy.block)
                        flops.setdefault(policy.block, set()).add(matmul_flops(eqn)[0])
                    continue
                if (first := again.get(i)) is not None:
                    if (k := position.get(first)) is not None:
                        instances[k] = instances[k].once_more
                    continue
                # Cotangents are the last inputs. What was read before the last one was born belongs
                # to the forward; what several blocks read from it is shared, such as a mask.
                last = eqn.invars[-1]
                born = len(jaxpr.eqns) if isinstance(last, Literal) else defined.get(last, -1)
                early = {v for v in variables(eqn) if first_use[v] < min(born, i)}
                shared = {v for v in early if block_uses[v] > 1}
                kinds = [
                    "free" if not isinstance(v, Literal) and v in shared else here(v)
                    for v in eqn.invars
                ]
                # A known value is a residual; `_instance` decides about the others.
                known = [k in ("free", "stacked") or v in early for v, k in zip(eqn.invars, kinds)]
                instance = _instance(eqn, kinds, known, frames + ((jaxpr, 1),), sharded)
                if instance is not None:
                    read = frozenset(s for s in map(stack_of, eqn.invars) if s is not None)
                    position[i] = _add(instances, dataclasses.replace(instance, stacks=read))
            elif (scan := as_scan(eqn)) is not None:
                # An array that another loop made and that this loop slices, one slice an iteration,
                # is a stack of saved tensors. An array that the loop reads whole is not. A scan's
                # operands are in this order: constants, carried values, sliced arrays.
                tags = set().union(*map(names_in, scan.jaxpr.eqns))
                if tags and not any(map(is_block, scan.jaxpr.eqns)):
                    opened.append((scan.length, tags, matmul_flops(eqn)[0] / scan.length))
                stacked = lambda v: v in defined and jaxpr.eqns[defined[v]].primitive.name == "scan"
                inner, sources, states = {}, {}, _carried_states(scan)
                for k, (outer, v) in enumerate(zip(eqn.invars, scan.jaxpr.invars)):
                    if scan.consts <= k < scan.consts + scan.carry:
                        inner[v] = "free" if k - scan.consts in states else "carry"
                    elif (
                        k >= scan.consts
                        and here(outer) != "free"
                        and (here(outer) == "stacked" or stacked(outer))
                    ):
                        inner[v], sources[v] = "stacked", stack_of(outer) or outer
                    else:  # read by an earlier equation too: it is in memory whatever the plan
                        early = not isinstance(outer, Literal) and first_use[outer] < i
                        inner[v] = "free" if early else here(outer)
                walk(scan.jaxpr, inner, frames + ((jaxpr, scan.length),), sharded, sources)
            else:
                for inner in subjaxprs(eqn):
                    # A call's operands are its body's inputs; a conditional has one more, first.
                    operands = eqn.invars[-len(inner.invars) :] if inner.invars else []
                    # A while loop's trip count is not known: its frame counts one iteration. It
                    # has no derivative, so that it holds both passes of its blocks, and what it
                    # carries is in memory in both.
                    loop = eqn.primitive.name == "while"
                    kinds = ["free" if loop else here(v) for v in operands]
                    known = dict(zip(inner.invars, kinds))
                    each = ((i, stack_of(v)) for i, v in zip(inner.invars, operands))
                    within = {i: s for i, s in each if s is not None}
                    divided = sharded or eqn.primitive.name == "shard_map"
                    kinds = walk(inner, known, frames + ((jaxpr, 1),), divided, within)
                    # Among these equations, only a call has exactly the outputs of its body.
                    if call_body(eqn) is not None:
                        origin.update(
                            {o: "free" for o, kind in zip(eqn.outvars, kinds) if kind == "free"}
                        )
        return [here(v) for v in jaxpr.outvars]

    walk(jaxpr, dict.fromkeys(jaxpr.invars, "free"), (), False, {})
    alike = {label: max(found) for label, found in flops.items() if len(found) == 1}

    products = [sum(matmul_flops(e.eqn)[0] for e in i.flat.nodes[: i.boundary]) for i in instances]

    def whole(i: Instance, work: float) -> Instance:
        tags = set().union(*(names_in(e.eqn) for e in i.flat.nodes[: i.boundary]))
        loops = (f for n, found, f in opened if n == i.layers and tags <= found)
        of_body = sum(n for other, n in zip(instances, products) if other.body == i.body)
        found = alike.get(i.label) or max(loops, default=0.0) * work / (of_body or 1.0)
        return dataclasses.replace(i, forward_flops=found)

    return Blocks([*map(whole, instances, products)], names, saved_names(jaxpr), plain_labels)


def _add(instances: list[Instance], new: Instance) -> int:
    """Appends an instance; returns its position. If an earlier instance reads the same stacks, the
    backward runs once more over the tensors that one forward saved, and the earlier instance counts
    the run.
    """
    for i, one in enumerate(instances):
        if new.stacks and (one.label, one.stacks) == (new.label, new.stacks):
            instances[i] = one.once_more
            return i
    instances.append(new)
    return len(instances) - 1


def _repeated(jaxpr: Jaxpr, defined: dict[Var, int]) -> dict[int, int]:
    """The block equations that repeat the backward of an earlier one, by position: they have its
    label and read the same values, but for cotangents, which are the last inputs and are made after
    the earlier one.
    A value behind a barrier, or copied to device memory, is the same value.

    defined: the position of the equation that makes each variable.
    """
    found: dict[int, int] = {}
    same: dict[Var, Any] = {}
    of = lambda v: v if isinstance(v, Literal) else same.get(v, v)
    for e in jaxpr.eqns:
        if e.primitive.name in (BARRIER, "device_put"):
            same.update((o, of(v)) for v, o in zip(e.invars, e.outvars))
    blocks = [(i, e) for i, e in enumerate(jaxpr.eqns) if is_block(e)]
    first: dict[Any, list[tuple[int, JaxprEqn]]] = {}
    for i, e in blocks:
        if not e.params.get("differentiated") or isinstance(e.invars[0], Literal):
            continue
        key = of(e.invars[0]), len(e.invars), policies_of(e)[0].block
        for j, earlier in first.setdefault(key, []):
            later = [v for v, w in zip(e.invars, earlier.invars) if of(v) is not of(w)]
            are_last = later == list(e.invars[len(e.invars) - len(later) :])
            is_late = lambda v, j=j: not isinstance(v, Literal) and defined.get(v, -1) > j
            if later and are_last and all(map(is_late, later)):
                found[i] = j
                break
        else:
            first[key].append((i, e))
    return found


def _instance(eqn, kinds, known, frames, sharded) -> Instance | None:
    """Reads one block equation of the backward; None where no cotangent reaches it.

    kinds, known: by input of the equation: where it comes from, and whether it is surely a
      residual.
    frames, sharded: the state of the walk, the equation's own jaxpr last.
    """
    flat = flatten(eqn.params["jaxpr"])
    tagged = [v for e in flat.nodes if is_tag(e.eqn) or holds_tag(e.eqn) for v in e.outputs]
    tag_ancestors = {v for e in leading_to(flat.nodes, tagged) for v in e.reads}
    # From the last input backward: cotangents end where an input feeds a tag, has no derivative, or
    # is surely a residual.
    cotangents = set()
    for number, sure in reversed(list(zip(flat.inputs, known))):
        inexact = jnp.issubdtype(flat.avals[number].dtype, jnp.inexact)
        if number in tag_ancestors or not inexact or (sure and cotangents):
            break
        cotangents.add(number)
    boundary = next((i for i, e in enumerate(flat.nodes) if cotangents & set(e.reads)), None)
    if not cotangents or boundary is None:
        return None
    charged = tuple(n for n, k in zip(flat.inputs, kinds) if k != "free" and n not in cotangents)
    names = set().union(*(names_in(e.eqn) for e in flat.nodes[:boundary]))
    layers, home, loops, runs = _repeats(names, frames)
    (policy,) = policies_of(eqn)
    return Instance(
        label=policy.block,
        flat=flat,
        cotangents=frozenset(cotangents),
        boundary=boundary,
        charged=charged,
        layers=layers,
        home=home,
        loops=loops,
        runs=runs,
        sharded=sharded,
        divisible=policy.layers,
        loop=policy.loop,
        body=id(frames[-1][0]),
    )


def _carried_states(loop: Scan) -> set[int]:
    """Positions of the model states among the values that a loop carries: stacks of which each
    iteration replaces a layer, such as moments, and values that each iteration copies from host
    memory for the next one, such as parameters. They are always in memory, and no block saves them.
    """
    flat = flatten(loop.jaxpr)
    made = {o: e for e in flat.nodes for o in e.outputs}
    given = flat.inputs[loop.consts : loop.consts + loop.carry]

    def fetched(value) -> bool:
        while (e := made.get(value)) is not None and e.eqn.primitive.name in VIEWS:
            # A barrier hands several operands on; every other view has its operand first.
            value = e.inputs[e.outputs.index(value) if len(e.outputs) > 1 else 0]
            if not isinstance(value, int):
                return False
            if on_host(flat.avals[value]):
                return not on_host(e.eqn.outvars[0].aval)
        return False

    def replaced(value, stack: int) -> bool:
        e = made.get(value)
        return e is not None and e.primitive == "dynamic_update_slice" and e.inputs[0] == stack

    pairs = [(k, *p) for k, p in enumerate(zip(flat.outputs, given)) if isinstance(p[0], int)]
    return {k for k, value, stack in pairs if replaced(value, stack) or fetched(value)}


def _repeats(
    names: set[str], frames: Sequence[tuple[Jaxpr, int]]
) -> tuple[int, int | None, int, int]:
    """Returns the `layers`, `home`, `loops` and `runs` of an `Instance`, counted from the innermost
    loop outwards.

    `runs` multiplies every trip count, `layers` the trip counts of loops that hold the backward
    alone: the forward ran before them in a loop of its own, so that all of its saved tensors are
    alive. A block without tags has no name by which to find its forward; its loop over layers is
    the loop that runs backward.

    names: the block's tags.
    frames: the jaxprs round the equation, outermost first, each with the trip count of the loop
      that leads on from it (1 where it is no loop).
    """
    layers, loops, runs, inside, home = 1, 0, 1, True, None
    jaxprs = [jaxpr for jaxpr, _ in frames]
    for depth in range(len(frames) - 1, -1, -1):
        length = frames[depth - 1][1] if depth else 1  # of the loop whose body this jaxpr is
        runs *= length
        if inside and (
            names & forward_names(jaxprs[depth])
            or (not names and not _in_loop(jaxprs, depth, lambda e: bool(e.params.get("reverse"))))
        ):
            inside = False  # the loop holds the forward too: outer loops multiply no live bytes
        if inside:
            layers, loops = layers * length, loops + (length > 1)
        elif home is None and _in_loop(jaxprs, depth, lambda _: True):
            home = id(jaxprs[depth])
    return layers, home, loops, runs


def _in_loop(jaxprs: Sequence[Jaxpr], depth: int, which: Callable[[JaxprEqn], bool]) -> bool:
    """Whether the jaxpr at `depth` is the body of such a loop."""
    loops = [e for e in jaxprs[depth - 1].eqns if e.primitive.name in ("scan", "while")]
    return depth > 0 and any(
        which(e) and any(inner is jaxprs[depth] for inner in subjaxprs(e)) for e in loops
    )
