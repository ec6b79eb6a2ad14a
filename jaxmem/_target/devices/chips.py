"""Every device of the tables, by its name: GPUs and TPUs."""

import re

from jaxmem._target.devices.gpus import GPUS, Gpu
from jaxmem._target.devices.tpus import TPUS, Tpu

Chip = Gpu | Tpu
CHIPS: dict[str, Chip] = {**GPUS, **TPUS}


def chip_of_kind(kind: str) -> Chip | None:
    """Returns the table's entry for a device's own description, such as 'NVIDIA A100-SXM4-40GB' or
    'TPU v5 lite', or None for an unknown one.
    """
    return next((chip for chip in CHIPS.values() if re.search(chip.matches, kind)), None)
