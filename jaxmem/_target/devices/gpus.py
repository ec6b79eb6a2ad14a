"""The GPUs that a step can be planned for, as data, and each one's description for XLA.

Rates are dense peaks without sparsity, from the source that each entry names. Memory is the
size that the CUDA driver reports to a program, a little under the datasheet's. Multiprocessors,
clocks and caches are from XLA's own `target_config/specs` or CUDA's deviceQuery. Host memory and
network are one device's share of a common cloud instance's (25 Gbit/s for g4dn, 400 for 8 GPUs of
p4de, 3200 for 8 of p5, p5en and p6; a desktop's is 10).
"""

import dataclasses

GiB, MiB, KiB = 2**30, 2**20, 2**10


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


_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9  # B/s of 16 lanes, each way
_C2C = 450e9  # B/s each way, of a Grace CPU's NVLink-C2C to its GPUs
_NVLINK3, _NVLINK4, _NVLINK5 = 300e9, 450e9, 900e9  # B/s of all its lines, each way
_GBIT = 1e9 / 8  # B/s

# fmt: off
_TABLE = (
    Gpu("t4", "Tesla T4", r"\bT4$", (7, 5), 15_843_721_216, 320e9, 65e12, 8.1e12,
        _PCIE3, _PCIE3, 25 * _GBIT, 16 * GiB, 40, 64, 1.59, 4 * MiB, 64 * KiB, 1024, False,
        "NVIDIA T4 datasheet, 2019; g4dn.xlarge"),
    Gpu("a10g", "NVIDIA A10G", r"\bA10G$", (8, 6), 22 * GiB, 600e9, 70e12, 35e12,
        _PCIE4, _PCIE4, 10 * _GBIT, 16 * GiB, 80, 128, 1.71, 6 * MiB, 100 * KiB, 1536, False,
        "NVIDIA A10G datasheet, 2021; g5.xlarge"),
    Gpu("l4", "NVIDIA L4", r"\bL4$", (8, 9), 22_478 * MiB, 300e9, 121e12, 60e12,
        _PCIE4, _PCIE4, 10 * _GBIT, 16 * GiB, 58, 128, 2.04, 48 * MiB, 100 * KiB, 1536, False,
        "NVIDIA L4 datasheet, 2023; g6.xlarge"),
    Gpu("l40s", "NVIDIA L40S", r"\bL40S$", (8, 9), 45_455 * MiB, 864e9, 362e12, 183e12,
        _PCIE4, _PCIE4, 10 * _GBIT, 32 * GiB, 142, 128, 2.52, 96 * MiB, 100 * KiB, 1536, False,
        "NVIDIA L40S datasheet, 2023; g6e.xlarge"),
    Gpu("a6000", "NVIDIA RTX A6000", r"\bRTX A6000$", (8, 6), 51_041_271_808, 768e9, 155e12, 77e12,
        _PCIE4, _PCIE4, 10 * _GBIT, 32 * GiB, 84, 128, 1.80, 6 * MiB, 100 * KiB, 1536, False,
        "NVIDIA RTX A6000 datasheet, 2020; a desktop"),
    Gpu("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", r"\bRTX 6000 Ada Generation$",
        (8, 9), 45_496 * MiB, 960e9, 364e12, 182e12,
        _PCIE4, _PCIE4, 10 * _GBIT, 32 * GiB, 142, 128, 2.505, 96 * MiB, 100 * KiB, 1536, False,
        "NVIDIA RTX 6000 Ada datasheet, 2022; a desktop"),
    Gpu("rtx6000-pro", "NVIDIA RTX PRO 6000 Blackwell", r"\bRTX PRO 6000 Blackwell",
        (12, 0), 97_249 * MiB, 1792e9, 503e12, 251e12,
        _PCIE5, _PCIE5, 10 * _GBIT, 64 * GiB, 188, 128, 2.6, 128 * MiB, 100 * KiB, 1536, False,
        "NVIDIA RTX Blackwell PRO whitepaper, 2025; a desktop"),
    Gpu("rtx3090", "NVIDIA GeForce RTX 3090", r"\bRTX 3090$",
        (8, 6), 24_238 * MiB, 936e9, 71e12, 35.6e12,
        _PCIE4, _PCIE4, 10 * _GBIT, 32 * GiB, 82, 128, 1.695, 6 * MiB, 100 * KiB, 1536, False,
        "NVIDIA Ampere GA102 whitepaper v2, table 9; a desktop"),
    Gpu("rtx4090", "NVIDIA GeForce RTX 4090", r"\bRTX 4090$",
        (8, 9), 24_084 * MiB, 1008e9, 165.2e12, 82.6e12,
        _PCIE4, _PCIE4, 10 * _GBIT, 32 * GiB, 128, 128, 2.52, 72 * MiB, 100 * KiB, 1536, False,
        "NVIDIA Ada whitepaper v2, appendix A; a desktop"),
    Gpu("rtx5090", "NVIDIA GeForce RTX 5090", r"\bRTX 5090$",
        (12, 0), 32_122 * MiB, 1792e9, 209.5e12, 104.8e12,
        _PCIE5, _PCIE5, 10 * _GBIT, 32 * GiB, 170, 128, 2.407, 96 * MiB, 100 * KiB, 1536, False,
        "NVIDIA RTX Blackwell whitepaper, appendix A; a desktop"),
    Gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", r"\bA100.*40GB",
        (8, 0), 42_298_834_944, 1555e9, 312e12, 156e12,
        _PCIE4, _NVLINK3, 50 * _GBIT, 79 * GiB, 108, 64, 1.41, 40 * MiB, 164 * KiB, 2048, False,
        "NVIDIA A100 datasheet, 2021; a2-highgpu-1g"),
    Gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", r"\bA100.*80GB",
        (8, 0), 85_100_068_864, 2039e9, 312e12, 156e12,
        _PCIE4, _NVLINK3, 50 * _GBIT, 158 * GiB, 108, 64, 1.41, 40 * MiB, 164 * KiB, 2048, False,
        "NVIDIA A100 datasheet, 2021; a2-ultragpu-1g"),
    Gpu("h100-80gb", "NVIDIA H100 80GB HBM3", r"\bH100 80GB HBM3$",
        (9, 0), 84_942_979_072, 3352e9, 989e12, 494e12,
        _PCIE5, _NVLINK4, 400 * _GBIT, 217 * GiB, 132, 128, 1.98, 50 * MiB, 228 * KiB, 2048, True,
        "NVIDIA H100 SXM datasheet, 2023; a3-highgpu-1g"),
    Gpu("h100-pcie", "NVIDIA H100 PCIe", r"\bH100 PCIe$",
        (9, 0), 84_942_979_072, 2039e9, 756e12, 378e12,
        _PCIE5, _PCIE5, 25 * _GBIT, 180 * GiB, 114, 128, 1.755, 50 * MiB, 228 * KiB, 2048, True,
        "NVIDIA H100 PCIe datasheet, 2023; a server with 2 TB for 8"),
    Gpu("h100-nvl", "NVIDIA H100 NVL", r"\bH100 NVL$",
        (9, 0), 95_232 * MiB, 3938e9, 835e12, 417e12,
        _PCIE5, _PCIE5, 80 * _GBIT, 256 * GiB, 132, 128, 1.785, 50 * MiB, 228 * KiB, 2048, True,
        "NVIDIA H100 NVL datasheet, 2024; NC40ads_H100_v5"),
    Gpu("gh200", "NVIDIA GH200 480GB", r"\bGH200 480GB$",
        (9, 0), 96_768 * MiB, 4000e9, 989e12, 494e12,
        _C2C, _C2C, 200 * _GBIT, 384 * GiB, 132, 128, 1.98, 50 * MiB, 228 * KiB, 2048, True,
        "NVIDIA GH200 datasheet, 2024, 96 GB of HBM3; 4/5 of its 480 GB"),
    Gpu("h200", "NVIDIA H200", r"\bH200$", (9, 0), 143_156 * MiB, 4800e9, 989e12, 494e12,
        _PCIE5, _NVLINK4, 400 * _GBIT, 256 * GiB, 132, 128, 1.98, 50 * MiB, 228 * KiB, 2048, True,
        "NVIDIA H200 SXM datasheet, 2024; an eighth of p5en.48xlarge"),
    Gpu("b200", "NVIDIA B200", r"\bB200$", (10, 0), 191_514_411_008, 7672e9, 2250e12, 1100e12,
        _PCIE5, _NVLINK5, 400 * _GBIT, 256 * GiB, 148, 128, 1.965, 132_644_864, 228 * KiB, 2048,
        True,
        "NVIDIA HGX B200 datasheet, 2025; an eighth of p6-b200.48xlarge"),
    Gpu("gb200", "NVIDIA GB200", r"\bGB200$", (10, 0), 197_897_748_480, 7928e9, 2500e12, 1250e12,
        _C2C / 2, _NVLINK5, 400 * _GBIT, 192 * GiB, 152, 128, 2.062, 135_528_448, 228 * KiB, 2048,
        False,
        "NVIDIA GB200 NVL72 datasheet, 2025; 4/5 of half of a superchip's 480 GB"),
    Gpu("b300", "NVIDIA B300", r"\bB300\b", (10, 3), 297_021_865_984, 7936e9, 2250e12, 1125e12,
        _PCIE5, _NVLINK5, 800 * _GBIT, 384 * GiB, 158, 128, 1.965, 135_528_448, 228 * KiB, 2048,
        False,
        "NVIDIA HGX B300 datasheet, 2025; an eighth of p6-b300.48xlarge"),
)
# fmt: on
GPUS = {gpu.name: gpu for gpu in _TABLE}


def target_config(gpu: Gpu) -> str:
    """Returns XLA's `GpuTargetConfigProto` of the GPU, in text form: all that a compile without the
    GPU knows of it. Plain numbers in it are the same for every GPU of the table.
    """
    major, minor = gpu.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KiB}
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {_optin_bytes(gpu)}
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
  cuda_compute_capability {{ major: {major} minor: {minor}{_accelerated(gpu)} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.description}"
"""


def _optin_bytes(gpu: Gpu) -> int:
    """Returns the shared memory that one block may ask for: all of a multiprocessor's on Turing,
    all but the driver's KiB since Ampere.
    """
    return gpu.shared_bytes - (KiB if gpu.capability >= (8, 0) else 0)


def _accelerated(gpu: Gpu) -> str:
    """Returns the field that allows Hopper's and Blackwell's own instructions (sm_90a, sm_100a), as
    XLA does where it finds the device.
    """
    return " feature_extension: ACCELERATED_FEATURES" if gpu.capability >= (9, 0) else ""
