"""The log of the progress of long work. `jaxmem/_cli/progress.py` shows it."""

import logging

LOG = logging.getLogger("jaxmem")
