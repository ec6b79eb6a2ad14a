"""The TPUs that a step can be planned for (`tpus.toml`), and the topologies of their slices."""

import dataclasses
import math
import re

from jaxmem._target.devices.table import read_table


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A kind of TPU. Every quantity is one device's, as JAX lists devices."""

    name: str  # as users write it, such as "v5e"
    description: str  # JAX's `device_kind`
    axes: int  # of its topologies: 2 for a plane, 3 for a cube
    per_chip: int  # devices that JAX lists a chip
    chip_config: str  # libtpu's name of how a chip's cores are used, "" for its default
    memory_bytes: int
    bandwidth: float  # B/s
    flops_16bit: float  # bfloat16 products with float32 sums
    product_efficiency: float  # the share of `flops_16bit` that products of large steps reach
    clock: float  # Hz
    cores: int  # tensor cores
    pcie: float  # B/s each way, the host link's line
    link: float  # B/s each way, of one link to a neighbouring chip
    host_bytes: int  # host memory for offloaded tensors
    source: str
    platform = "tpu"
    has_xla_estimates = True  # by the compiler's fusions
    time_source = "a roofline of XLA's fusions"  # of plans, in words

    @property
    def flops_f32(self) -> float:
        return self.flops_16bit

    @property
    def vector_ops(self) -> float:
        """Operations on float32 numbers outside of products, a second: 8 x 128 lanes a core, of
        which each has 4 arithmetic units.
        """
        return self.cores * 8 * 128 * 4 * self.clock

    @property
    def matches(self) -> str:
        """A regular expression for the `device_kind` of a device at hand."""
        return f"^{re.escape(self.description)}$"


LONGEST = {"v5e": 16, "v6e": 16}  # chips along an axis; 32 of others
TPUS = read_table(Tpu, "tpus.toml")


@dataclasses.dataclass(frozen=True)
class Topology:
    """How the chips of a slice are wired.

    tpu: their kind.
    shape: the chips along each axis.
    """

    tpu: Tpu
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """As many as JAX lists."""
        return self.chips * self.tpu.per_chip

    @property
    def name(self) -> str:
        """As libtpu writes it, and as a target is written: "v5e:4x4"."""
        return f"{self.tpu.name}:{'x'.join(map(str, self.shape))}"

    @property
    def host(self) -> tuple[int, int, int]:
        """The chips of one host along three axes: two by two, fewer where an axis is odd."""
        pair = [2 if n % 2 == 0 else 1 for n in self.shape[:2]]
        return (pair[0], pair[1], 1)

    @property
    def hosts(self) -> int:
        return self.chips // math.prod(self.host)

    @property
    def ring(self) -> float:
        """B/s that reach each device when all devices gather an array, along every axis at once.

        Around a ring, data reach a device from both sides. Along an axis without a link between its
        ends, a device at an end receives from one side.
        """
        if self.chips > 1:
            return self.tpu.link * sum(1 + self._closes(n) for n in self.shape if n > 1)
        return self.tpu.bandwidth if self.tpu.per_chip > 1 else 0.0  # both share one memory

    def _closes(self, chips: int) -> bool:
        """Whether an axis of so many chips is a ring: of a plane, the longest axis that is sold; of
        a cube, each axis if the slice is made of whole cubes of 4 x 4 x 4.
        """
        if self.tpu.axes == 3:
            return all(n % 4 == 0 for n in self.shape)
        return chips == LONGEST.get(self.tpu.name, 32)


def topology_of(tpu: Tpu, text: str) -> Topology:
    """Reads what stands behind a TPU's name and a colon: a number of chips, "" for one, or their
    number along each axis, such as "4x4".

    Raises ValueError, with the expected forms, for other text.
    """
    example = "x".join("4" * tpu.axes)
    expected = (
        f"a number of chips that is a power of two, as in '{tpu.name}:8', or chips along each of"
        f" {tpu.axes} axes, as in '{tpu.name}:{example}'"
    )
    if not re.fullmatch(r"(0*[1-9]\d{0,5}(x0*[1-9]\d{0,5})*)?", text):
        raise ValueError(expected)
    numbers = [int(n) for n in text.split("x")] if text else [1]
    longest = LONGEST.get(tpu.name, 32)
    if max(numbers) > (longest if len(numbers) > 1 else longest**tpu.axes):
        raise ValueError(f"{expected}, of at most {longest} along an axis")
    if len(numbers) == tpu.axes:
        return Topology(tpu, tuple(numbers))
    if len(numbers) > 1 or numbers[0] & (numbers[0] - 1):
        raise ValueError(expected)
    return Topology(tpu, _balanced(numbers[0], tpu.axes))


def _balanced(chips: int, axes: int) -> tuple[int, ...]:
    """The sides of a power of two of chips, as equal as can be: of a plane or a cube as they are
    sold, with the longest side last. Four chips of a cube are one host's plane.
    """
    if axes == 3 and chips <= 4:
        return (*_balanced(chips, 2), 1)
    power = chips.bit_length() - 1
    return tuple(2 ** ((power + i) // axes) for i in range(axes))
