"""The log that says how long work goes on; `jaxmem/_cli/progress.py` shows it."""

import logging

LOG = logging.getLogger("jaxmem")
