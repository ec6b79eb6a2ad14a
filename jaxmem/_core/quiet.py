"""Silences the traceback that JAX logs when its CUDA plugin is installed on a machine without a
GPU.
"""

import logging
import os


def quiet_plugin_noise() -> None:
    """Drops the CUDA plugin's traceback from JAX's log, on a machine that has no driver. Where
    there is one, the traceback tells of a defect, and stays.
    """
    if any(
        os.path.exists(path)
        # a driver's files on Linux, and on Windows' subsystem for Linux (dxg)
        for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
    ):
        return
    # A filter acts on its own logger's records alone, so it goes to the one that writes this
    # record; no such name, no harm.
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return "Jax plugin configuration error" not in record.getMessage()
