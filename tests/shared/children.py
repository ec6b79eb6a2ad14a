"""Environments of the processes that tests start for devices which they have not."""

import os
import sys

import jax

# XLA's earlier emitters compile in half of the time, on the versions that still have them.
EMITTERS = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""


def finding_packages() -> dict[str, str]:
    """This process's environment, with all that it imports from."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def with_cpus(devices: int) -> dict[str, str]:
    """The environment of as many CPU devices, whose programs compile quickly and run slowly."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        f"{EMITTERS}"
    )
    return finding_packages() | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
