"""The log in which long work says how far it is; `jaxmem/_cli/progress.py` shows it."""

import logging

LOG = logging.getLogger("jaxmem")
