"""The chips that a step can be planned for: the GPUs of `gpus.toml`, with each one's description
for XLA, and the TPUs of `tpus.toml`, with the topologies of their slices.
"""

import dataclasses
import math
import pathlib
import re
import tomllib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
KiB = 2**10
LONGEST = {"v5e": 16, "v6e": 16}  # chips along an axis; 32 of others


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU, by its datasheet. Every quantity is one device's."""

    name: str  # as users write it, such as "a100-80gb"
    description: str  # as the driver spells it: XLA looks up its performance tables by it
    matches: str  # a regular expression for the `device_kind` of a device at hand
    capability: tuple[int, int]  # CUDA's compute capability, (9, 0) for 9.0
    memory_bytes: int
    bandwidth: float  # B/s
    flops_16bit: float  # tensor cores, float16 or bfloat16 with float32 sums
    flops_f32: float  # float32 products as XLA runs them by default: TF32 where there is one
    pcie: float  # B/s each way, the line's
    peers: float  # B/s each way, to the other GPUs of its host: NVLink's, or else the PCIe line's
    network: float  # B/s each way, its share of a common instance's network to other hosts
    host_bytes: int  # host memory for offloaded tensors
    cores: int  # multiprocessors
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int  # a multiprocessor's
    threads_per_core: int
    # whether XLA has a table of matrix products for it; if not, asking for its estimates is an
    # error
    has_xla_estimates: bool
    source: str  # the datasheet of the rates; the instance or machine of the host memory
    platform = "cuda"
    # The share of its peak that a product reaches. Fitted to XLA's table of products that were
    # measured on an H100 (benchmarks/estimates.py).
    product_efficiency = 0.79

    @property
    def time_source(self) -> str:
        """Where the times of plans come from, in words."""
        return "XLA's estimates" if self.has_xla_estimates else "a roofline"

    @property
    def compute_capability(self) -> int:
        """As kernels are compiled for it: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]


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


def _read(make: Callable[..., T], name: str) -> dict[str, T]:
    """Returns the chips of a file, by name.

    make: takes the name of a section, and its entries as keywords, and returns a chip.
    name: the name of the file, in the folder of this module.
    """
    table = tomllib.loads(pathlib.Path(__file__).with_name(name).read_text("utf-8"))
    plain = lambda value: tuple(value) if isinstance(value, list) else value
    entries = lambda fields: {key: plain(value) for key, value in fields.items()}
    return {name: make(name=name, **entries(fields)) for name, fields in table.items()}


Chip = Gpu | Tpu
GPUS = _read(Gpu, "gpus.toml")
TPUS = _read(Tpu, "tpus.toml")
CHIPS: dict[str, Chip] = {**GPUS, **TPUS}


def chip_of_kind(kind: str) -> Chip | None:
    """Returns the table's entry for a device's own description, such as 'NVIDIA A100-SXM4-40GB' or
    'TPU v5 lite', or None for an unknown one.
    """
    return next((chip for chip in CHIPS.values() if re.search(chip.matches, kind)), None)


def target_config(gpu: Gpu) -> str:
    """Returns XLA's `GpuTargetConfigProto` of the GPU, in text form: all that a compile without the
    GPU knows of it. Plain numbers in it are the same for every GPU of the table.
    """
    major, minor = gpu.capability
    # One block may ask for all of a multiprocessor's shared memory on Turing, and for all but the
    # driver's KiB since Ampere.
    optin_bytes = gpu.shared_bytes - (KiB if gpu.capability >= (8, 0) else 0)
    # As XLA allows Hopper's and Blackwell's own instructions (sm_90a, sm_100a) where it finds them.
    accelerated = " feature_extension: ACCELERATED_FEATURES" if gpu.capability >= (9, 0) else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KiB}
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {optin_bytes}
  threads_per_core_limit: {gpu.threads_per_core}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.description}"
"""


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
