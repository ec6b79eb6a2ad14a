"""The GPUs that a step can be planned for (`gpus.toml`), and each one's description for XLA."""

import dataclasses

from jaxmem._target.devices.table import read_table

KiB = 2**10


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


GPUS = read_table(Gpu, "gpus.toml")


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
