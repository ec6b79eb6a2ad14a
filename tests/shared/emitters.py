"""XLA's flags with which the tests compile quickly. Import this file before JAX."""

import importlib.metadata

# XLA:CPU's older emitters compile in a fraction of the seconds of its fusion emitters. jaxlib 0.10
# and 0.11 have different flags for them, and 0.12 has no older emitters. XLA ends the process at
# unknown flags.
OLDER = {
    "0.10": "--xla_cpu_use_fusion_emitters=false",
    "0.11": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
}.get(importlib.metadata.version("jaxlib")[:4], "")
# Programs are not split for threads, since a worker of the tests has one core.
QUICK = f"--xla_cpu_parallel_codegen_split_count=1 {OLDER}".rstrip()
