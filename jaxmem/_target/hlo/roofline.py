"""Estimates the time of an optimized TPU module by a roofline of each of its kernels: the slowest
of its matrix products, its other arithmetic, and its traffic to and from the device's memory.

The compiler's own estimates are not used: its `optimal_seconds` may be negative, and its cycles of
a copy are several times the cycles at the memory's bandwidth.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxmem._target.hlo.collectives import Collectives, is_collective
from jaxmem._target.hlo.costs import HloCosts
from jaxmem._target.hlo.kernels import Kernels
from jaxmem._target.hlo.products import dilated_flops, flops_of
from jaxmem._target.hlo.text import Array, HloModule, Instruction, behind

# These pass values on, or make values of nothing: no byte moves.
_FREE = frozenset(
    ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "opt-barrier")
    + ("partition-id", "replica-id", "add-dependency", "async-update", "copy-done")
    + ("slice-done", "dynamic-slice-done", "dynamic-update-slice-done", "async-done")
)
_MOVES = frozenset(("copy-start", "slice-start", "dynamic-slice-start", "async-start"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))
# These rearrange numbers, and compute none.
_PLACED = _FREE | _MOVES | _SLICES | _UPDATES | {"broadcast", "reshape", "transpose", "copy"}
_PLACED |= {"iota", "concatenate", "pad", "reverse"}
_PLACED |= {"fusion", "call", "while", "conditional", "custom-call"}
# By opcode: the arithmetic operations that one result costs, where a core needs several. The unit
# for special functions makes one result while the other units make four.
_SPECIAL = ("exponential", "log", "tanh", "logistic", "rsqrt", "sqrt", "divide")
_DEAR: dict[str, int] = dict.fromkeys(_SPECIAL, 4)
_DEAR |= dict.fromkeys(("exponential-minus-one", "log-plus-one", "cosine", "sine", "erf"), 16)
_DEAR |= {"power": 8, "remainder": 8}
_IN_PLACE = "output_to_operand_aliasing={{}: (0, {})}"


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of a kernel, or of several kernels that run one after the other.

    busy: seconds in kernels.
    idle: the part of `busy` during which the device's memory is unused, where copies can hide.
    moved: seconds of copies between the device's memory and the memory of its cores, which overlap
      with the kernels.
    crossed: seconds of transfers between devices, which overlap with the kernels.
    flops, products: FLOPs of matrix products, and their number.
    """

    busy: float = 0.0
    idle: float = 0.0
    moved: float = 0.0
    crossed: float = 0.0
    flops: int = 0
    products: int = 0

    @property
    def unused(self) -> float:
        """Seconds of `seconds` in which neither kernels nor copies use the memory."""
        return max(0.0, self.seconds - (self.busy - self.idle) - self.moved)

    @property
    def seconds(self) -> float:
        """Copies overlap with kernels that leave the memory idle. Transfers between devices overlap
        with kernels and with copies.
        """
        return max(self.busy + max(0.0, self.moved - self.idle), self.crossed)


@dataclasses.dataclass(frozen=True)
class TpuRates:
    """The rates by which the time of a TPU's program is estimated.

    bandwidth: the rate of the device's memory, B/s.
    products: the rate of matrix products, FLOP/s.
    vector: the rate of other arithmetic operations, 1/s.
    ring: the rate of a ring over the devices, B/s each way; 0 for one device.
    neighbours: the rate of the links to both neighbours along an axis together, B/s; 0 for one
      device.
    """

    bandwidth: float
    products: float
    vector: float
    ring: float
    neighbours: float


def tpu_costs(text: str, rates: TpuRates, kernels: Sequence[Sequence] = ()) -> HloCosts:
    """Returns the costs of the optimized TPU module in `text`, without copies to host memory and
    back.

    A loop counts as often as its condition says, or once if the condition compares with no
    constant. A conditional counts as its most expensive branch.

    kernels: the FLOPs of Pallas kernels, as `kernel_flops` returns them.
    """
    module = HloModule(text)
    work = _Program(module, rates, kernels).sequence(module.entry)
    return HloCosts(work.flops, work.products, work.seconds)


class _Program:
    """A module's computations. Each is estimated once."""

    def __init__(self, module: HloModule, rates: TpuRates, kernels):
        self._module, self._rates = module, rates
        self._kernels = Kernels(kernels)
        self._collectives = Collectives(module, rates.ring, rates.neighbours)
        self._known: dict[str, Work] = {}

    def sequence(self, name: str) -> Work:
        """A computation whose instructions run one after the other."""
        if name not in self._known:
            self._known[name] = total(self._beside_loops(self._module.body(name)))
        return self._known[name]

    def _beside_loops(self, body: Sequence[Instruction]) -> Iterator[Work]:
        """The work of each instruction. A copy that starts before a loop and ends after it hides
        where the loop's iterations leave the memory idle.
        """
        going: dict[str, float] = {}  # copies that were started and not waited for
        for i in body:
            work = self._one(i)
            if i.opcode == "while":
                hidden = min(work.idle, sum(going.values()))
                if hidden:
                    left = 1 - hidden / sum(going.values())
                    going = {name: left * seconds for name, seconds in going.items()}
                work = dataclasses.replace(work, idle=0.0, moved=-hidden)
            elif work.moved:
                going[i.name] = work.moved
            for name in i.operand_names:
                if i.opcode.endswith("-done"):
                    going.pop(name, None)
                elif i.opcode.endswith("-update") and name in going:
                    going[i.name] = going.pop(name)
            yield work

    def _one(self, i: Instruction) -> Work:
        """The work of one instruction, and of the computations that it calls."""
        if i.opcode == "while":
            body = total([self.sequence(name) for name in i.runs])
            turns = self._module.turns(i)
            # Turns wait for each other: what does not hide in one is not hidden by the next.
            seconds, idle = turns * body.seconds, turns * body.unused
            return Work(seconds, idle, flops=turns * body.flops, products=turns * body.products)
        if i.opcode == "conditional":
            return max(map(self.sequence, i.called), key=lambda w: w.seconds, default=Work())
        if i.opcode == "call":
            return total([self.sequence(name) for name in i.runs])
        if is_collective(i):
            seconds = self._collectives.seconds(i)
            return Work(crossed=seconds) if i.opcode.endswith("-start") else Work(busy=seconds)
        if i.opcode in _FREE or i.opcode == "" or any(a.host for a in (*i.operands, *i.results)):
            return Work()
        if i.opcode in _MOVES:
            # A collective may be wrapped so that it is asynchronous.
            if i.opcode == "async-start" and self._collectives.kinds_within(i):
                return Work(crossed=self._collectives.seconds_within(i))
            return Work(moved=self._moved(i) / self._rates.bandwidth)
        return self._kernel(i)

    def _kernel(self, i: Instruction) -> Work:
        """The work of one kernel, such as a fusion: its arithmetic or its memory traffic, whichever
        takes longer.
        """
        # A fusion may start a collective, which other fusions continue next to their own work, and
        # a last fusion ends. The collective counts at its start; its start and end have no other
        # work.
        if i.opcode == "fusion" and i.name.startswith("async-collective-"):
            started = i.name.startswith("async-collective-start")
            return Work(crossed=self._collectives.seconds_within(i) if started else 0.0)
        inner = self._module.body(i.runs[0]) if i.opcode == "fusion" and i.runs else [i]
        if _carries(i):
            inner = [j for j in inner if not is_collective(j)]
        flops, products, operations = self._arithmetic(inner)
        nbytes = self._traffic(i, inner)
        computing = max(flops / self._rates.products, operations / self._rates.vector)
        moving = nbytes / self._rates.bandwidth
        busy = max(computing, moving)
        kinds = self._collectives.kinds_within(i) if i.opcode == "fusion" else set()
        # A reduction stands in a fusion alone, and holds the others up.
        if not _carries(i) and kinds & {"all-reduce", "reduce-scatter"}:
            # What is written there as an all-reduce is sliced, so that it scatters and no more.
            busy += self._collectives.seconds_within(i) / (2 if "all-reduce" in kinds else 1)
        return Work(busy, max(0.0, busy - moving), flops=flops, products=products)

    def _arithmetic(self, body: Sequence[Instruction]) -> tuple[int, int, float]:
        """FLOPs and number of the products of a kernel, and operations of all else in it."""
        flops = products = 0
        operations = 0.0
        for i in body:
            if i.opcode == "fusion":
                inner = self._arithmetic(self._module.run_by(i))
                flops, products, operations = (
                    flops + inner[0], products + inner[1], operations + inner[2]
                )  # fmt: skip
            elif (own := _flops(i)) is not None:
                flops, products = flops + own, products + 1
            elif i.opcode == "custom-call":
                computed, dear = self._kernels.computes(i)
                flops, products = flops + computed, products + (computed > 0)
                operations += _DEAR["exponential"] * dear
            elif i.opcode not in _PLACED:
                arrays = i.operands[:1] if i.opcode.startswith("reduce") else i.results[:1]
                operations += _DEAR.get(i.opcode, 1) * sum(math.prod(a.shape) for a in arrays)
        return flops, products, operations

    def _traffic(self, i: Instruction, body: Sequence[Instruction]) -> int:
        """Bytes that a kernel reads from the device's memory and writes to it."""
        if i.opcode != "fusion":
            if i.opcode in _UPDATES:
                return 2 * sum(map(_bytes, _updates(i)))
            if i.opcode in _SLICES:
                return 2 * _bytes(i.output)
            if i.opcode == "custom-call" and '"AllocateBuffer"' in i.text:
                return 0
            return sum(map(_bytes, (*i.operands, *i.results)))
        given = {j.parameter: j for j in body if j.opcode == "parameter"}
        read = sum(
            self._read(given[k], body, a) if k in given else _bytes(a)
            for k, a in enumerate(i.operands)
        )
        root = body[-1] if body else i
        made = {j.name: j for j in body}
        parts = [root] * len(i.results)
        if root.opcode == "tuple":
            parts = [made.get(n) for n in root.operand_names]
        written, in_place = 0, _in_place(i)
        for k, (a, part) in enumerate(zip(i.results, parts)):
            part = behind(("bitcast",), part, made)
            # Results of a collective in addition to the kernel's, and results that the kernel only
            # passes on.
            if k in in_place and (part is None or part.opcode == "parameter"):
                continue
            if part is not None and part.opcode in _UPDATES and not a.on_core:
                written += sum(update.tiled_bytes for update in _updates(part))
            else:
                written += _bytes(a)
        return read + written

    def _read(self, given: Instruction, body: Sequence[Instruction], array: Array) -> int:
        """Bytes that a fusion reads of a parameter: of slices alone where it reads no more."""
        if array.on_core or array.host:
            return 0
        names, total = {given.name}, 0
        for j in body:
            used = [k for k, n in enumerate(j.operand_names) if n in names]
            if not used or j.opcode == "tuple":  # a tuple hands it on
                continue
            # A loop's stack may be tiled otherwise within a kernel. That takes no more of it than
            # what reads the result, whose memory is the stack's own.
            if j.opcode == "bitcast" or (j.opcode == "fusion" and _IN_PLACE in j.text):
                names.add(j.name)
            elif j.opcode in _SLICES and used == [0]:
                total += j.output.tiled_bytes
            elif j.opcode in _UPDATES and used == [0]:
                continue  # updated in place
            elif j.opcode == "fusion" and j.runs:
                inner = self._module.body(j.runs[0])
                for k in used:
                    inside = next((p for p in inner if p.parameter == k), None)
                    total += (
                        array.tiled_bytes if inside is None else self._read(inside, inner, array)
                    )
            else:
                return array.tiled_bytes
        return min(total, array.tiled_bytes)

    def _moved(self, i: Instruction) -> int:
        """Bytes of a copy that overlaps with kernels: the bytes of the smaller end, since the copy
        may move a slice of its source.
        """
        ends = [a for a in (*i.operands[:1], *i.results) if a.shape]
        sides = 2 - any(a.on_core for a in ends)
        return sides * min((a.tiled_bytes for a in ends), default=0)


def _carries(i: Instruction) -> bool:
    """Whether a fusion contains a part of an asynchronous collective that an earlier fusion
    started.
    """
    return any("async_collective" in name for name in (*i.runs, i.name))


def _in_place(i: Instruction) -> set[int]:
    """The indices of the fusion's results that share their buffer with an operand."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?)\}, calls=", i.text)
    return {int(n or 0) for n in re.findall(r"\{(\d*)\}: \(", found[1])} if found else set()


def _updates(i: Instruction) -> Sequence[Array]:
    """The operand that is written into an array. In a scatter it follows the indices."""
    return i.operands[2:3] if i.opcode == "scatter" else i.operands[1:2]


def _flops(i: Instruction) -> int | None:
    """The FLOPs of a product or a convolution; None for other instructions."""
    return dilated_flops(i) if i.opcode == "convolution" else flops_of(i)


def _bytes(array: Array) -> int:
    """Bytes of an array in the device's memory, with what its tiles pad."""
    return 0 if array.on_core or array.host else array.tiled_bytes


def total(works: Iterable[Work]) -> Work:
    """The work of kernels that run one after the other."""
    known = list(works)
    add: Callable[[str], float] = lambda name: math.fsum(getattr(w, name) for w in known)
    flops, products = sum(w.flops for w in known), sum(w.products for w in known)
    return Work(add("busy"), add("idle"), add("moved"), add("crossed"), flops, products)
