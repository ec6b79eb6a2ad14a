"""Silences what JAX's plugins print on a machine that has none of their devices: they are installed
there to compile for devices that are elsewhere.
"""

import glob
import logging
import os

# What libtpu reads of a TPU's own machine. Told it, it asks nobody, and prints no errors.
LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # any: a topology that is compiled for names its own
}


def quiet_plugin_noise() -> None:
    """Drops the CUDA plugin's traceback from JAX's log, on a machine that has no driver, and has
    libtpu not look for its machine where there is no TPU. Where there are devices, what plugins
    print tells of a defect, and stays.
    """
    # A filter acts on its own logger's records alone, so it goes to the one that writes these
    # records; no such name, no harm.
    log = logging.getLogger("jax._src.xla_bridge")
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/*"):
        log.addFilter(_is_not_of_a_tpu)
        for name, value in LIBTPU.items():
            os.environ.setdefault(name, value)
    if any(
        os.path.exists(path)
        # a driver's files on Linux, and on Windows' subsystem for Linux (dxg)
        for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
    ):
        return
    log.addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return "Jax plugin configuration error" not in record.getMessage()


def _is_not_of_a_tpu(record: logging.LogRecord) -> bool:
    return "backend 'tpu'" not in record.getMessage()
