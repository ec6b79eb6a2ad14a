"""Silences messages of JAX's plugins on a machine without their devices, where the plugins are
installed for deviceless compilation.
"""

import glob
import logging
import os
from collections.abc import Callable

# Facts that libtpu queries from a TPU's machine. If they are set, it makes no query that can fail.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # any: a topology that is compiled for names its own
}


def quiet_plugin_noise() -> None:
    """Drops the CUDA plugin's traceback from JAX's log on a machine without a driver, and libtpu's
    query for its machine on a machine without a TPU. On a machine with devices, a plugin's message
    reports a defect, and is shown.
    """
    # A filter acts on the records of its own logger only. If JAX renames the logger, the filter has
    # no effect.
    # Remove with a public name: JAX 0.10 to 0.12 exports none for the logger.
    log = logging.getLogger("jax._src.xla_bridge")
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/*"):
        log.addFilter(_lacks("backend 'tpu'"))
        for name, value in LIBTPU.items():
            os.environ.setdefault(name, value)
    # A driver's files on Linux, and on Windows' subsystem for Linux (dxg).
    drivers = "/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"
    if not any(map(os.path.exists, drivers)):
        log.addFilter(_lacks("Jax plugin configuration error"))  # about a GPU plugin without a GPU


def _lacks(words: str) -> Callable[[logging.LogRecord], bool]:
    """The filter that drops log records with these words."""
    return lambda record: words not in record.getMessage()
