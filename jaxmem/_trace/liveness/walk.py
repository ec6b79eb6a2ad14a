"""The liveness estimate: runs through a traced step as XLA would schedule it, and returns the most
bytes that are alive at the same time.

The result is an estimate, and no bound: XLA fuses by a cost model, and has schedules of its own.
`benchmarks/estimates.py` compares the estimate with compiled steps.
"""

import dataclasses
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxmem._trace.jaxpr import Jaxpr, Scan, as_closed, call_body, equations, per_device, subjaxprs
from jaxmem._trace.liveness.division import MeshDivision, divide
from jaxmem._trace.liveness.kernels import (
    SLICED,
    Body,
    Kernel,
    device_bytes,
    kernels_of,
    partial_sums,
)
from jaxmem._trace.liveness.order import ORDERS, as_written, with_fetches_first
from jaxmem._trace.rewrite import Program, flatten
from jaxmem_kernels import has_gpu_kernel, reference_of

INSIDE = ("cond", "shard_map")  # with loops, the primitives whose bodies hold values
REDUCED = ("psum", "psum_invariant")  # over devices, in the memory of the operand

Order = Callable[[Body, Callable[[int], int]], list[int]]


def temporary_bytes(
    jaxpr,
    donated: Collection[int],
    *,
    on_gpu: bool,
    shards: int = 1,
    divided: bool = False,
    shardings: Sequence[NamedSharding | None] = (),
) -> int:
    """Returns the bytes that a step is expected to take on a device in addition to its arguments:
    temporaries, and results that reuse no argument's buffer.

    jaxpr: the step's, closed.
    donated: positions of the arguments whose buffers results may reuse.
    on_gpu: whether the step is compiled for a GPU.
    shards: the number of devices that divide values. Inside `jax.shard_map` values are divided
      already. Not used for a step whose arguments have known shardings.
    divided: whether the codecs' kernels run on divided arrays too. Without the hardware, the
      partitioner does not ask how to divide a kernel, so the references are compiled instead.
    shardings: of the arguments, as far as they are known.
    """
    whole = jaxpr
    jaxpr, donated, shards = _on_one_device(jaxpr, donated, shards)
    shardings = shardings if jaxpr is whole else ()
    is_divided = shards > 1 or any(s is not None and any(s.spec) for s in shardings)
    as_references = on_gpu and is_divided
    is_kernel = lambda eqn: not as_references or (divided and has_gpu_kernel(eqn))
    programs = _Programs(is_kernel, on_gpu)
    flat = programs.flat(jaxpr)
    division = divide(flat, shardings, programs.flat)
    walks = [_Walk(order, programs, shards) for order in ORDERS]
    least = min(walk.step(flat, donated, division, order) for walk, order in zip(walks, ORDERS))
    # In a depth-first order, a program without a loop over its layers computes the weights'
    # gradients last. The operands of these gradients stay alive until then. The program is the
    # whole step, or the body of a loop over microbatches (`_inside`).
    written = min(walk.step(flat, donated, division, as_written) for walk in walks)
    return written if written < FAR_LESS * least else least


def _on_one_device(jaxpr, donated: Collection[int], shards: int):
    """If a step is one `jax.shard_map`, returns the program of one device, the positions of the
    donated arguments in this program, and 1 for the shards. Any other step is returned unchanged.
    """
    flat = flatten(jaxpr)
    if [e.eqn.primitive.name for e in flat.nodes] != ["shard_map"]:
        return jaxpr, donated, shards
    (mapped,) = flat.nodes
    position = {v: i for i, v in enumerate(mapped.inputs) if isinstance(v, int)}
    given = [flat.inputs[i] for i in donated]
    return mapped.eqn.params["jaxpr"], [position[v] for v in given if v in position], 1


def runs_references(jaxpr) -> bool:
    """Whether a program that is compiled without the hardware has a codec with a GPU kernel on
    arrays that XLA divides among devices. The codec's reference then runs in place of its kernel.
    """
    divides = equations(as_closed(jaxpr).jaxpr, lambda eqn: eqn.primitive.name != "shard_map")
    return any(map(has_gpu_kernel, divides))


# If the program's own order takes less than this share of a depth-first order's bytes, XLA takes an
# order like the program's. The estimate cannot tell closer orders apart.
FAR_LESS = 0.75
# Kernels of a loop's body without inner loops, above which the body is taken for several layers
# with their backward. Bodies of one layer of the planner's tests have up to 53, and the body of six
# small layers has 276.
SEVERAL_LAYERS = 150


@dataclasses.dataclass(frozen=True)
class _Programs:
    """Programs with their calls inlined, and their kernels, each computed once.

    is_kernel: whether the equation of a codec is one kernel. Otherwise the codec's reference is
      inlined, since GPUs divide the arrays, and the codec has no GPU kernel, or no kernel runs on
      divided arrays. A codec of whole arrays is one kernel, also on a CPU, whose fusions an
      estimate knows less well.
    on_gpu: whether the step is compiled for a GPU.
    known: by id of a jaxpr, the jaxpr, so that no other jaxpr gets its id, and its program.
    fused: by id of a program and the number of its sliced inputs, its kernels.
    """

    is_kernel: Callable[[Any], bool]
    on_gpu: bool
    known: dict[int, tuple[Any, Program]] = dataclasses.field(default_factory=dict)
    fused: dict[tuple[int, int], Body] = dataclasses.field(default_factory=dict)

    def flat(self, jaxpr) -> Program:
        """The program of a jaxpr."""
        if id(jaxpr) not in self.known:
            body_of = lambda e: call_body(e) or (None if self.is_kernel(e) else reference_of(e))
            self.known[id(jaxpr)] = jaxpr, flatten(jaxpr, barriers=True, body_of=body_of)
        return self.known[id(jaxpr)][1]

    def kernels(self, flat: Program, sliced: int = 0) -> Body:
        """The kernels of a program of `flat`, whose last `sliced` inputs are slices."""
        key = id(flat), sliced
        if key not in self.fused:
            self.fused[key] = kernels_of(flat, sliced, self.on_gpu)
        return self.fused[key]


class _Walk:
    """One estimate, by one order of kernels. The body of each loop is estimated once, unless a mesh
    divides its values in several ways.

    shards: the number of devices that divide a value, if the value's division is unknown.
    """

    def __init__(self, order: Order, programs: _Programs, shards: int):
        self._order, self._programs, self._shards = order, programs, shards
        self._known: dict[tuple, int] = {}

    def step(
        self, flat: Program, donated: Collection[int], division: MeshDivision | None, order: Order
    ) -> int:
        """The most bytes in addition to the arguments.

        division: how a mesh divides values; None if unknown.
        order: the order of the step's own kernels, which may differ from the order inside loops.
        """
        body = self._programs.kernels(flat)
        # Results take the memory of donated arguments of their shape, as JAX pairs them.
        kind = lambda v: (flat.avals[v].shape, flat.avals[v].dtype)
        free = Counter(kind(flat.inputs[i]) for i in donated)
        held = set()
        for v in flat.outputs:
            if isinstance(v, int) and free[kind(v)] > 0:
                free[kind(v)] -= 1
                held.add(v)
        placed = {o for v, o in zip(flat.outputs, body.outputs) if o is not None and v in held}
        sizes = _Sizes(body, division, self._shards)
        most = self._most(body, _with_carried(body, placed), sizes, order)
        relaid = () if division is None else division.relaid
        return most + sum(map(sizes.of, relaid))

    def _inside(
        self, jaxpr: Jaxpr, loop: Scan | None, division: MeshDivision | None, shards: int
    ) -> int:
        """The most bytes that a loop's body takes in addition to its inputs and carried values."""
        key = id(jaxpr), shards, None if division is None else tuple(division.specs)
        if key not in self._known:
            flat = self._programs.flat(jaxpr)
            sliced = 0 if loop is None else len(flat.inputs) - loop.consts - loop.carry
            body = self._programs.kernels(flat, sliced)
            carried = {}
            if loop is not None:
                given = flat.inputs[loop.consts : loop.consts + loop.carry]
                carried = {o: i for i, o in zip(given, body.outputs) if o is not None}
            sizes = _Sizes(body, division, shards)

            def most(order: Order) -> int:
                placed = _with_carried(body, self._in_place(body, carried, order))
                return self._most(body, placed, sizes, order)

            least = most(self._order)
            # Layers, whose bodies are short, keep the depth-first order.
            unrolled = len(body.kernels) > SEVERAL_LAYERS and not any(k.loop for k in body.kernels)
            written = most(as_written) if unrolled else least
            self._known[key] = written if written < FAR_LESS * least else least
        return self._known[key]

    def _in_place(self, body: Body, carried: dict[int, int], order_of: Order) -> set[int]:
        """The carried values that a loop updates in place.

        carried: by carried output, the input that it replaces. The output may reuse the input's
          buffer if it is made after the last read of the input.
        order_of: the order of the kernels.
        """
        order = self._positions(body, order_of, _Sizes(body, None, 1).of)
        last = {v: k for k, i in enumerate(order) for v in body.kernels[i].reads}
        found = {o for o in carried if o in body.inputs}
        for k, i in enumerate(order):
            kernel = body.kernels[i]
            for o in carried.keys() & set(kernel.writes):
                given = carried[o]
                if last.get(given, -1) < k or given in kernel.overwrites:
                    found.add(o)
        return found

    def _positions(self, body: Body, order: Order, size: Callable[[int], int]) -> list[int]:
        """The order in which the kernels run; on a GPU, copies from host memory come first."""
        found = order(body, size)
        return with_fetches_first(body, found) if self._programs.on_gpu else found

    def _most(self, body: Body, placed: Collection[int], sizes: "_Sizes", order: Order) -> int:
        """The most bytes of values that the program makes and that are alive at the same time.

        placed: values whose memory is counted elsewhere.
        """
        size = sizes.of
        positions = self._positions(body, order, size)
        gathered = sizes.gathered([body.kernels[i] for i in positions])
        last = {v: k for k, i in enumerate(positions) for v in body.kernels[i].reads}
        last |= dict.fromkeys((o for o in body.outputs if o is not None), len(positions))
        ends = defaultdict(list)
        for v, k in last.items():
            ends[k].append(v)
        alive: dict[int, int] = {}
        now = most = 0
        for k, i in enumerate(positions):
            kernel = body.kernels[i]
            for position, v in enumerate(kernel.writes):
                alive[v] = 0 if v in placed or position in kernel.stacked_twice else size(v)
            dying = [v for v in ends[k] if v in alive and v not in kernel.writes]
            saved = _overwritten(kernel, dying, alive)
            new = sum(alive[v] for v in kernel.writes)
            most = max(most, now + new - saved + self._within(kernel, sizes) + gathered[k])
            unread = [v for v in kernel.writes if v not in last]
            now += new - sum(alive.pop(v) for v in (*dying, *unread))
        return most + sizes.weights

    def _within(self, kernel: Kernel, sizes: "_Sizes") -> int:
        """Bytes that a kernel, or the body of a loop, takes while it runs."""
        shards, inside = sizes.shards, sizes.inside(kernel)
        if (loop := kernel.loop) is not None:
            return self._inside(loop.jaxpr, loop, next(inside), shards)
        if kernel.primitive == "dot_general" and self._programs.on_gpu and not sizes.divided:
            return partial_sums(kernel.eqn)
        if kernel.primitive not in INSIDE:
            return 0
        shards = 1 if kernel.primitive == "shard_map" else shards
        bodies = zip(subjaxprs(kernel.eqn), inside)
        return max((self._inside(j, None, one, shards) for j, one in bodies), default=0)


class _Sizes:
    """The bytes of a program's values on one device.

    division: how a mesh divides the values; None if unknown.
    shards: the number of devices that then divide each value.
    """

    def __init__(self, body: Body, division: MeshDivision | None, shards: int):
        self._avals, self._division, self.shards = body.avals, division, shards
        # A slice that a loop's iteration reads has a number of its own.
        sliced = (k for k in body.kernels if k.primitive == SLICED)
        self._slices = {v: u for k in sliced for u, v in zip(k.reads, k.writes)}

    def of(self, v: int) -> int:
        size = device_bytes(self._avals[v])
        if self._division is None or not size:
            return per_device(size, self.shards)
        return per_device(size, self._division.parts(self._slices.get(v, v)))

    @property
    def divided(self) -> bool:
        """Whether a mesh divides the program's values."""
        return self.shards > 1 or self._division is not None

    @property
    def weights(self) -> int:
        """Bytes of whole weights while the program runs."""
        return 0 if self._division is None else self._division.weights

    def gathered(self, kernels: Sequence[Kernel]) -> list[int]:
        """By position of a kernel, the bytes of whole activations while it runs: each is alive from
        its first to its last reader.
        """
        known = {} if self._division is None else self._division.gathered
        readers: dict[int, list[int]] = defaultdict(list)
        bytes_of: dict[int, int] = {}
        for k, kernel in enumerate(kernels):
            for v, size in known.get(kernel.writes, ()):
                readers[v].append(k)
                bytes_of[v] = max(size, bytes_of.get(v, 0))
        found = [0] * len(kernels)
        for v, ks in readers.items():
            for k in range(ks[0], ks[-1] + 1):
                found[k] += bytes_of[v]
        return found

    def inside(self, kernel: Kernel) -> Iterator[MeshDivision | None]:
        """The divisions of the bodies that a kernel runs."""
        known = {} if self._division is None else self._division.inside
        yield from known.get(kernel.writes, ())
        yield from itertools.repeat(None)


def _with_carried(body: Body, placed: set[int]) -> set[int]:
    """Adds to `placed` the values whose buffers loops and reductions over devices reuse for values
    in `placed`. So moments that several loops update one after the other are stored once.
    """
    last = {v: k for k, kernel in enumerate(body.kernels) for v in kernel.reads}
    kind = functools.cache(lambda v: str(body.avals[v]))  # an equation's constant has none
    found = set(placed)
    reduced = {v for kernel in body.kernels if kernel.primitive in REDUCED for v in kernel.writes}
    for k, kernel in reversed(list(enumerate(body.kernels))):
        loop = kernel.loop
        begun = [v for v in sorted(kernel.overwrites - body.inputs - found) if last[v] == k]
        if loop is None and kernel.primitive not in REDUCED:
            begun = [v for v in begun if v in reduced]
        for v in kernel.writes if loop is None else kernel.writes[: loop.carry]:
            if v in found and (of_kind := [u for u in begun if kind(u) == kind(v)]):
                found.add(of_kind[0])
                begun.remove(of_kind[0])
    return found


def _overwritten(kernel: Kernel, dying, alive) -> int:
    """Bytes of operands that no later kernel reads and whose buffers the results reuse."""
    over = [v for v in dying if v in kernel.overwrites]
    if (loop := kernel.loop) is None:
        return max((alive[v] for v in over), default=0)
    # A loop's carried values keep the memory of their initial values.
    return min(
        sum(alive[v] for v in over if v not in kernel.writes),
        sum(alive[v] for v in kernel.writes[: loop.carry]),
    )
