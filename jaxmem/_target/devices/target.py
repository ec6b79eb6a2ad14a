"""Describes what a step is planned for: the device at hand, or a named GPU or TPU that need not be
there.
"""

import dataclasses
import difflib
import os
import pathlib
import re

from jaxmem._target.devices.chips import CHIPS, Chip, chip_of_kind
from jaxmem._target.devices.gpus import GPUS, Gpu
from jaxmem._target.devices.rates import LINK_EFFICIENCY, link_ways, rates_of
from jaxmem._target.devices.tpus import TPUS, Topology, Tpu, topology_of
from jaxmem.errors import TargetError

USABLE_FRACTION = 0.95
_CPU_FLOPS_PER_CORE, _CPU_BANDWIDTH = 32e9, 20e9  # an ordinary core and memory channel: estimates


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device, how many of them, and on how many hosts. Every quantity is one device's.

    `usable_bytes` is what a program may use. For a named GPU that is 95 % of what the driver
    reports: the rest is taken by the CUDA context, by libraries and by fragmentation. JAX itself
    takes only 75 % unless `XLA_PYTHON_CLIENT_MEM_FRACTION=.95` is set. For a named TPU it is what
    libtpu's compiler lets a program take. For `local` it is what the runtime says (GPU, TPU), or
    90 % of the memory that the machine or its container has (CPU).

    Rates are measured ones where `jaxmem calibrate` has left them, else the datasheet's; then
    `link` is 80 % of the PCIe line's, each way, about what pinned copies reach. Where a check
    measured it to the device and to the host, states that are placed are priced by these,
    `link_ways`. For a local CPU, rates are rough estimates; times there are measured anyway.
    """

    name: str  # "local", or a GPU's or TPU's name
    kind: str  # the device's own description
    platform: str  # "cpu" | "cuda" | "rocm" | "tpu"
    devices: int
    local: bool
    usable_bytes: int
    bandwidth: float  # B/s
    matmul_flops: float  # bfloat16 or float16 products, FLOP/s
    flops_f32: float  # float32 products
    link: float  # host link, B/s each way
    host_bytes: int  # host memory for offloaded tensors
    cores: int  # multiprocessors of a GPU, tensor cores of a TPU, cores of a CPU
    link_ways: tuple[float, float] | None = None  # B/s to the device and to the host, if measured
    peers: float = 0.0  # B/s each way of a ring over all devices: what copies between them reach
    hosts: int = 1  # among which the devices are divided evenly
    shape: tuple[int, ...] = ()  # a TPU's chips along each axis of its topology

    @property
    def chip(self) -> Chip | None:
        """The table's entry for a named device, None for `local`."""
        return None if self.local else CHIPS[self.name]

    @property
    def gpu(self) -> Gpu | None:
        """The table's entry for a named GPU, None for others."""
        return None if self.local else GPUS.get(self.name)

    @property
    def topology(self) -> Topology | None:
        """How the chips of a named TPU are wired; None for others."""
        return None if self.local or not self.shape else Topology(TPUS[self.name], self.shape)

    @property
    def compute_capability(self) -> int | None:
        """A named GPU's compute capability, such as 90; None for others."""
        return None if self.gpu is None else self.gpu.compute_capability

    def __str__(self) -> str:
        if self.topology is not None:
            return self.name if self.topology.chips == 1 else self.topology.name
        if self.local or self.devices == 1:
            return self.name
        each = f"{self.name}:{self.devices // self.hosts}"
        return each if self.hosts == 1 else f"{each}x{self.hosts}"

    @classmethod
    def parse(cls, target: "str | Target") -> "Target":
        """Reads `local`, the name of a GPU, `name:N` for N of them on one host, or `name:NxH` for N
        on each of H hosts; the name of a TPU, `name:N` for a slice of N chips, or `name:AxB` and
        `name:AxBxC` for one of so many chips along each axis.

        Raises:
          TargetError: an unknown name, or a number or topology that there is not.
        """
        if isinstance(target, Target):
            return target
        if not isinstance(target, str):
            raise TargetError(
                f"`target` must be text or a Target, got {type(target).__name__}: {_EXPECTED}"
            )
        name, colon, count = target.strip().lower().partition(":")
        if name == "local" and not colon:
            return _local()
        if name in TPUS and (count or not colon):
            try:
                return _named_tpu(topology_of(TPUS[name], count))
            except ValueError as error:
                raise TargetError(
                    f"`target` {target!r}: {count!r} is no topology of {name!r}; expected {error}"
                ) from None
        if name not in GPUS:
            raise TargetError(_unknown(target, name))
        if colon and not re.fullmatch("0*[1-9][0-9]*(x0*[1-9][0-9]*)?", count):
            raise TargetError(
                f"`target` {target!r}: the number of devices is {count!r}; it must be a whole"
                " number of at least 1, "
                f"as in '{name}:8', or two of them, as in '{name}:8x2' for 8 on each of 2 hosts"
            )
        each, _, hosts = count.partition("x")
        return _named(GPUS[name], int(each or 1), int(hosts or 1))


_EXPECTED = (
    f"expected 'local', one of {', '.join(GPUS)}, or one of these with ':N' for N devices of one"
    f" host, or ':NxH' for N on each of H hosts; or one of {', '.join(TPUS)}, or one of these with"
    " ':N' for N chips, or a topology such as ':4x4'"
)


def _unknown(target: str, name: str) -> str:
    """The message for a target whose `name` is not in the table."""
    if name.startswith("v100"):
        return (
            f"`target` {target!r}: the CUDA 13 compiler no longer knows the V100 (sm_70). "
            "Use 't4', the oldest GPU it knows, or 'h200' with `budget=` set to the V100's 16 or 32"
            " GB; "
            "bytes differ little, times do not carry over"
        )
    if name == "local":
        return (
            f"`target` {target!r}: 'local' takes no number of devices; it is all the devices that"
            " JAX sees here"
        )
    # "a100" is the beginning of two names: all of them are offered, before those spelled alike.
    longer = [known for known in CHIPS if name and known.startswith(name)]
    near = longer or difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"`target` {target!r} is not known{hint} {_EXPECTED[0].upper()}{_EXPECTED[1:]}"


def _named(gpu: Gpu, each: int, hosts: int) -> Target:
    # A ring over hosts crosses between them by the network of all devices of a host together.
    ring = gpu.peers if hosts == 1 else min(gpu.peers, gpu.network * each)
    return _of_chip(gpu, each * hosts, hosts, int(USABLE_FRACTION * gpu.memory_bytes), ring)


def _named_tpu(topology: Topology) -> Target:
    tpu, devices, hosts = topology.tpu, topology.devices, topology.hosts
    target = _of_chip(tpu, devices, hosts, tpu.memory_bytes, topology.ring)
    return dataclasses.replace(target, shape=topology.shape)


def _of_chip(chip: Chip, devices: int, hosts: int, usable: int, ring: float) -> Target:
    rates = rates_of(chip)
    return Target(
        name=chip.name,
        kind=chip.description,
        platform=chip.platform,
        devices=devices,
        local=False,
        usable_bytes=usable,
        bandwidth=rates.bandwidth,
        matmul_flops=rates.flops_16bit,
        flops_f32=rates.flops_f32,
        link=rates.link,
        host_bytes=chip.host_bytes,
        cores=chip.cores,
        link_ways=link_ways(chip),
        peers=LINK_EFFICIENCY * ring,
        hosts=hosts,
    )


def _local() -> Target:
    """The devices that JAX has here. Raises TargetError if they do not report their memory."""
    import jax

    devices = jax.local_devices()
    device, host = devices[0], host_memory_bytes()
    if device.platform == "cpu":
        cores = os.cpu_count() or 1
        usable, bandwidth, link = 0.9 * host, _CPU_BANDWIDTH, _CPU_BANDWIDTH
        ways, peers = None, _CPU_BANDWIDTH
        matmul = f32 = _CPU_FLOPS_PER_CORE * cores
        platform = "cpu"
    else:
        usable = (device.memory_stats() or {}).get("bytes_limit")
        if not usable:
            raise TargetError(
                f"`target` 'local': {device.device_kind} does not report its memory; give `target`"
                f" by name: {_EXPECTED}"
            )
        # An unknown device gets modest rates. They matter little, since times are measured.
        modest: Chip = TPUS["v2"] if device.platform == "tpu" else GPUS["a10g"]
        chip = chip_of_kind(device.device_kind) or modest
        rates, ways, cores = rates_of(chip), link_ways(chip), chip.cores
        peers = LINK_EFFICIENCY * (chip.link if isinstance(chip, Tpu) else chip.peers)
        bandwidth, matmul, f32, link = (
            rates.bandwidth,
            rates.flops_16bit,
            rates.flops_f32,
            rates.link,
        )
        rocm = "rocm" in device.client.platform_version.lower()
        platform = device.platform if device.platform != "gpu" else "rocm" if rocm else "cuda"
    # JAX's CPU devices share one memory; a GPU's `bytes_limit` is its own. Host memory is shared by
    # all.
    shared = len(devices) if platform == "cpu" else 1
    return Target(
        name="local",
        kind=device.device_kind,
        platform=platform,
        devices=len(devices) * jax.process_count(),  # a step may run on those of all processes
        local=True,
        usable_bytes=int(usable) // shared,
        bandwidth=bandwidth,
        matmul_flops=matmul,
        flops_f32=f32,
        link=link,
        host_bytes=int(0.9 * host) // len(devices),
        cores=cores,
        link_ways=ways,
        peers=peers,
    )


def host_memory_bytes(root: str = "/") -> int:
    """Returns the bytes of memory of this machine, or of its container where that is less.

    root: where the file system begins.
    """
    limits = [_meminfo_bytes(root)]
    # The container's limit, as version 2 and version 1 of cgroups have it.
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(pathlib.Path(root, path)).strip()
        limits += [int(text)] if text.isdecimal() else []  # "max" is no limit
    return min(limits)


def free_host_bytes() -> int:
    """Returns the bytes of memory of this machine, or of its container, that are free now."""
    return min(host_memory_bytes(), _meminfo_bytes("/", "MemAvailable"))


def free_bytes(target: Target) -> int:
    """Returns the bytes of memory that are free now, on each of the devices at hand."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    shared = len(jax.local_devices()) if target.platform == "cpu" else 1
    return min(target.usable_bytes, free_host_bytes() // shared)


def _meminfo_bytes(root: str, what: str = "MemTotal") -> int:
    """Bytes of memory of the machine; `what` is a name of the kernel's table."""
    if found := re.search(rf"^{what}:\s*(\d+) kB", _read(pathlib.Path(root, "proc/meminfo")), re.M):
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # systems without /proc


def _read(path: pathlib.Path) -> str:
    """The file's text, "" where there is none or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
