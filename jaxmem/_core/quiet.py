"""Silences a traceback that says nothing: JAX's CUDA plugin misses a driver where there is none."""

import logging
import os


def quiet_plugin_noise() -> None:
    """Drops one record of jax's log, where there is no driver: the traceback of the CUDA plugin
    that misses it.
    """
    if any(
        os.path.exists(path)
        for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
    ):
        return
    # A filter acts on its own logger's records alone, so it goes to the one that writes this
    # record; no such name, no harm.
    logging.getLogger("jax._src.xla_bridge").addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return "Jax plugin configuration error" not in record.getMessage()
