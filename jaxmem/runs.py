"""A run: a loop that goes on where it stopped, and its folder with metrics.jsonl, summary.json,
plan.json, checkpoints and a page.

`record` writes them while a run goes on, so that they appear when it ends, and no earlier run is
lost to one that fails. `train` is the loop; `Interrupted` is how a signal ends it. `read` reads the
results, `newest` and `best` a checkpoint; `jaxmem report` draws them. `Rectifier` revises a plan
while its model trains.
"""

from jaxmem._checkpoints.checkpoints import Checkpoint as Checkpoint
from jaxmem._core.files import write_whole as write_whole
from jaxmem._outliers.rectify import Rectifier as Rectifier
from jaxmem._processes.signals import Interrupted as Interrupted
from jaxmem._runs.folder import best as best
from jaxmem._runs.folder import newest as newest
from jaxmem._runs.folder import record as record
from jaxmem._runs.read import Run as Run
from jaxmem._runs.read import read as read
from jaxmem._runs.record import Record as Record
from jaxmem._runs.train import train as train
