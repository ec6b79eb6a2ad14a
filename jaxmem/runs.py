"""A run: a loop that goes on where it stopped, and its folder with metrics.jsonl, summary.json,
plan.json, checkpoints and a page.

`record` writes them while a run goes on, so that they appear when it ends, and no earlier run is
lost to one that fails. `train` is the loop; `Interrupted` is how a signal ends it. `read` reads the
results, `newest` and `best` a checkpoint; `jaxmem report` draws them. `Rectifier` revises a plan
while its model trains.
"""

from jaxmem._core.files import write_whole as write_whole
from jaxmem._target.processes.signals import Interrupted as Interrupted
from jaxmem._train.checkpoints.checkpoints import Checkpoint as Checkpoint
from jaxmem._train.rectifier.rectify import Rectifier as Rectifier
from jaxmem._train.runs.folder import best as best
from jaxmem._train.runs.folder import newest as newest
from jaxmem._train.runs.folder import record as record
from jaxmem._train.runs.read import Run as Run
from jaxmem._train.runs.read import read as read
from jaxmem._train.runs.record import Record as Record
from jaxmem._train.runs.train import train as train
