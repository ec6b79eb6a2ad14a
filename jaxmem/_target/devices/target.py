"""The target of a plan: the device at hand, or a named GPU or TPU that need not be at hand."""

import dataclasses
import difflib
import os
import pathlib
import re

from jaxmem._target.devices import chips
from jaxmem._target.devices.platforms import Platform, platform_of
from jaxmem._target.devices.rates import LINK_EFFICIENCY, Rates, link_ways, rates_of
from jaxmem.errors import TargetError

USABLE_FRACTION = 0.95
_CPU_FLOPS_PER_CORE, _CPU_BANDWIDTH = 32e9, 20e9  # an ordinary core and memory channel: estimates


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device, and the number of devices. Every quantity is for one device.

    name: "local", or the name of a GPU or a TPU.
    kind: the device's own description.
    platform: "cpu", "cuda", "rocm" or "tpu".
    devices: number of devices.
    local: whether the target is the device at hand.
    usable_bytes: bytes of memory that a program may use.
    bandwidth: memory bandwidth, bytes per second.
    matmul_flops: rate of bfloat16 and float16 matrix products, FLOP per second.
    flops_f32: rate of float32 matrix products, FLOP per second.
    link: rate of the host link in each direction, bytes per second.
    host_bytes: bytes of host memory for offloaded tensors.
    cores: number of multiprocessors of a GPU, tensor cores of a TPU, or cores of a CPU.
    link_ways: rates of the host link to the device and to the host, bytes per second. None if they
      were not measured.
    peers: rate of copies in each direction of a ring over all devices, bytes per second.
    hosts: number of hosts. The devices are divided evenly over the hosts.
    shape: number of chips along each axis of a TPU's topology. Empty for other targets.

    For a named GPU, `usable_bytes` is 95 % of the memory that the driver reports. The CUDA context,
    libraries and fragmentation take the rest. JAX itself takes only 75 % unless
    `XLA_PYTHON_CLIENT_MEM_FRACTION=.95` is set. For a named TPU, `usable_bytes` is the memory that
    libtpu's compiler lets a program use. For `local`, `usable_bytes` is the memory that the runtime
    reports (GPU, TPU), or 90 % of the memory of the machine or its container (CPU).

    Rates are the measurements of `jaxmem calibrate` if the chip was calibrated, and otherwise the
    datasheet's rates. Without a calibration, `link` is 80 % of the PCIe rate in each direction,
    which pinned copies about reach. If a calibration measured both directions of the host link,
    placed states are priced by `link_ways`. For a local CPU, the rates are rough estimates; jaxmem
    measures times there.
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
    def traits(self) -> Platform:
        """The facts of the target's platform."""
        return platform_of(self.platform)

    @property
    def chip(self) -> chips.Chip | None:
        """The table's entry for a named device. None for `local`."""
        return None if self.local else chips.CHIPS[self.name]

    @property
    def gpu(self) -> chips.Gpu | None:
        """The table's entry for a named GPU. None for other targets."""
        return None if self.local else chips.GPUS.get(self.name)

    @property
    def topology(self) -> chips.Topology | None:
        """The topology of a named TPU. None for other targets.

        A topology has the kind of chip, and the number of chips along each axis.
        """
        tpu = chips.TPUS.get(self.name)
        return chips.Topology(tpu, self.shape) if tpu and self.shape else None

    @property
    def compute_capability(self) -> int | None:
        """The compute capability of a named GPU, such as 90. None for other targets."""
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
        """Reads the text form of a target.

        target: a text, or a `Target`, which is returned as it is. `local` means the devices at
          hand. `name` means one GPU or one TPU chip. For a GPU, `name:N` means N GPUs of one host,
          and `name:NxH` means N GPUs on each of H hosts. For a TPU, `name:N` means a slice of N
          chips, and `name:AxB` and `name:AxBxC` mean a slice with so many chips along each axis.

        Raises TargetError for an unknown name, and for a number of devices or a topology that does
        not exist.
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
        if name in chips.TPUS and (count or not colon):
            try:
                return _named_tpu(chips.topology_of(chips.TPUS[name], count))
            except ValueError as error:
                raise TargetError(
                    f"`target` {target!r}: {count!r} is no topology of {name!r}; expected {error}"
                ) from None
        if name not in chips.GPUS:
            raise TargetError(_unknown(target, name))
        if colon and not re.fullmatch("0*[1-9][0-9]*(x0*[1-9][0-9]*)?", count):
            raise TargetError(
                f"`target` {target!r}: the number of devices is {count!r}; it must be a whole"
                " number of at least 1, "
                f"as in '{name}:8', or two of them, as in '{name}:8x2' for 8 on each of 2 hosts"
            )
        each, _, hosts = count.partition("x")
        return _named(chips.GPUS[name], int(each or 1), int(hosts or 1))


_EXPECTED = (
    f"expected 'local', one of {', '.join(chips.GPUS)}, or one of these with ':N' for N devices of"
    f" one host, or ':NxH' for N on each of H hosts; or one of {', '.join(chips.TPUS)}, or one of"
    " these with ':N' for N chips, or a topology such as ':4x4'"
)


# Names of platforms, and Google Cloud's name of the v5e, as in "v5litepod-8".
_OTHER_NAMES = {"cpu": "local", "gpu": "local", "cuda": "local", "tpu": "local", "v5litepod": "v5e"}


def _unknown(target: str, name: str) -> str:
    """The message for a target whose `name` is not in the table."""
    if name.startswith("v100"):
        return (
            f"`target` {target!r}: the CUDA 13 compiler no longer knows the V100 (sm_70). Use 't4',"
            " the oldest GPU it knows, or 'h200' with `budget=` set to the V100's 16 or 32 GB;"
            " bytes differ little, times do not carry over"
        )
    if name == "local":
        return (
            f"`target` {target!r}: 'local' takes no number of devices; it is all the devices that"
            " JAX sees here"
        )
    # "a100" is the beginning of two names: all of them are offered, before those spelled alike.
    longer = [known for known in chips.CHIPS if name and known.startswith(name)]
    other = _OTHER_NAMES.get(name.partition("-")[0])
    similar = difflib.get_close_matches(name, chips.CHIPS, n=1, cutoff=0.3)
    near = [other] if other else longer or similar
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"`target` {target!r} is not known{hint} {_EXPECTED[0].upper()}{_EXPECTED[1:]}"


def _named(gpu: chips.Gpu, each: int, hosts: int) -> Target:
    """Returns the target of `each` GPUs on each of several hosts."""
    # A ring over hosts crosses between them by the network of all devices of a host together.
    ring = gpu.peers if hosts == 1 else min(gpu.peers, gpu.network * each)
    return _of_chip(gpu, each * hosts, hosts, int(USABLE_FRACTION * gpu.memory_bytes), ring)


def _named_tpu(topology: chips.Topology) -> Target:
    """Returns the target of a slice of TPUs."""
    tpu, devices, hosts = topology.tpu, topology.devices, topology.hosts
    target = _of_chip(tpu, devices, hosts, tpu.memory_bytes, topology.ring)
    return dataclasses.replace(target, shape=topology.shape)


def _of_chip(chip: chips.Chip, devices: int, hosts: int, usable: int, ring: float) -> Target:
    """Returns the target of several devices of a chip.

    usable: bytes of one device.
    ring: bytes a second of each device in a ring over all of them.
    """
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
        flops = _CPU_FLOPS_PER_CORE * cores
        rates = Rates(_CPU_BANDWIDTH, flops, flops, link=_CPU_BANDWIDTH, codec=_CPU_BANDWIDTH)
        usable, ways, peers = 0.9 * host, None, _CPU_BANDWIDTH
        platform = "cpu"
    else:
        usable = (device.memory_stats() or {}).get("bytes_limit")
        if not usable:
            raise TargetError(
                f"`target` 'local': {device.device_kind} does not report its memory; give `target`"
                f" by name: {_EXPECTED}"
            )
        # An unknown device gets modest rates. They matter little, since times are measured.
        modest: chips.Chip = chips.TPUS["v2"] if device.platform == "tpu" else chips.GPUS["a10g"]
        chip = chips.chip_of_kind(device.device_kind) or modest
        rates, ways, cores = rates_of(chip), link_ways(chip), chip.cores
        peers = LINK_EFFICIENCY * (chip.link if isinstance(chip, chips.Tpu) else chip.peers)
        rocm = "rocm" in device.client.platform_version.lower()
        platform = device.platform if device.platform != "gpu" else "rocm" if rocm else "cuda"
    # JAX's CPU devices share one memory; a GPU's `bytes_limit` is its own. Host memory is shared by
    # all.
    shared = len(devices) if platform == "cpu" else 1
    return Target(
        name="local",
        kind=device.device_kind,
        platform=platform,
        devices=len(devices) * jax.process_count(),  # a step may run on all processes' devices
        local=True,
        usable_bytes=int(usable) // shared,
        bandwidth=rates.bandwidth,
        matmul_flops=rates.flops_16bit,
        flops_f32=rates.flops_f32,
        link=rates.link,
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
