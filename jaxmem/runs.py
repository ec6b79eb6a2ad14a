"""A run's folder: metrics.jsonl, summary.json, plan.json and a page, written whole and read back.

`record` writes them while a run goes on, so that they appear when it ends, and no earlier run is
lost to one that fails. `read` reads them; `jaxmem report` draws them.
"""

from jaxmem._core.files import write_whole as write_whole
from jaxmem._runs.folder import Record as Record
from jaxmem._runs.folder import record as record
from jaxmem._runs.read import Run as Run
from jaxmem._runs.read import read as read
