"""A training loop that resumes after an interruption, and the folder with a run's results.

`record` opens a run's folder. The folder holds metrics.jsonl, summary.json, plan.json, checkpoints
and a page. `record` writes the results to a temporary folder and moves them when the run ends, so
that a failed run does not replace an earlier run.

`train` is the training loop. `train` raises `Interrupted` if a signal ends the run. `read` reads a
run's results, `newest` and `best` read a checkpoint, and `jaxmem report` makes a page from the
results. `Rectifier` revises a plan during training. `write_whole` writes a file atomically.
"""

from jaxmem._core.files import write_whole as write_whole
from jaxmem._target.processes.signals import Interrupted as Interrupted
from jaxmem._train.checkpoints.checkpoints import Checkpoint as Checkpoint
from jaxmem._train.rectifier.rectify import Rectifier as Rectifier
from jaxmem._train.runs.folder import best as best
from jaxmem._train.runs.folder import newest as newest
from jaxmem._train.runs.folder import record as record
from jaxmem._train.runs.record import Record as Record
from jaxmem._train.runs.run import Run as Run
from jaxmem._train.runs.run import read as read
from jaxmem._train.runs.train import train as train
