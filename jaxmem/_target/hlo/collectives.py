"""Estimates the seconds of transfers between devices in an optimized TPU module: over a ring of all
devices, or to neighbours alone.
"""

from collections.abc import Iterator, Sequence

from jaxmem._target.hlo.text import Array, HloModule, Instruction

# Bytes that cross to other devices, as a share of the larger of operand and result: in a ring over
# n devices (n-1)/n, which is taken as 1, and twice that for a reduction whose result all hold.
CROSSING = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}
CROSSING |= {"all-reduce": 2, "ragged-all-to-all": 1, "collective-broadcast": 1}


class Collectives:
    """The collectives of a module.

    module: the module.
    ring: of a ring over the devices, B/s each way; 0 where there is one device.
    neighbours: of the links to both neighbours along an axis together, B/s.
    """

    def __init__(self, module: HloModule, ring: float, neighbours: float):
        self._module, self._ring, self._neighbours = module, ring, neighbours

    def seconds(self, i: Instruction) -> float:
        """The seconds of a collective. Of an asynchronous collective, the start has all seconds."""
        if i.opcode.endswith("-done") or not self._ring:
            return 0.0
        # A matrix product that is divided along a ring sends in both directions at once, by two
        # permutes. Each permute uses one of the two links, and no other axis.
        permutes = kind_of(i) == "collective-permute"
        rate = self._neighbours if permutes else self._ring
        return CROSSING[kind_of(i)] * crossed_bytes(i) / rate

    def kinds_within(self, i: Instruction) -> set[str]:
        """The kinds of the collectives in a fusion or a wrapped operation, such as "all-gather"."""
        return {kind_of(j) for j in self._within(i)}

    def seconds_within(self, i: Instruction) -> float:
        """The seconds of the collectives in a fusion or a wrapped operation together."""
        return sum(map(self.seconds, self._within(i)))

    def _within(self, i: Instruction) -> Iterator[Instruction]:
        """The collectives in the computations that an instruction calls, at every depth."""
        return filter(is_collective, self._module.within(i, lambda j: not is_collective(j)))


def is_collective(i: Instruction) -> bool:
    return kind_of(i) in CROSSING


def kind_of(i: Instruction) -> str:
    """The collective's name, without the suffix of its start or its end."""
    return i.opcode.removesuffix("-start").removesuffix("-done")


def crossed_bytes(i: Instruction) -> int:
    """Bytes of the larger side of a collective, of all its arrays."""
    given, made = _size(i.operands), _size(i.results)
    # What starts one hands its operands on among its results.
    return max(given, made - given if i.opcode.endswith("-start") else made)


def _size(arrays: Sequence[Array]) -> int:
    """Bytes of arrays in the memory's tiles. Scalars are not counted."""
    return sum(a.tiled_bytes for a in arrays if a.shape)
