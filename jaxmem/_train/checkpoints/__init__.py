"""Checkpoints on disk: saved states, and the digests by which a whole checkpoint is known.

A checkpoint gets its name last. orbax writes the arrays, each under a number, so that reading them
needs no tree of the user's. The manifest holds their names and shapes. Then all files are summed
and flushed, and the folder is renamed. So a folder with a step's name was whole once, and is
reported as damaged if it is not. A process that was killed leaves a folder of another name, which
is not reported.

The alternative is orbax's CheckpointManager (0.12.8), with its atomic rename and its preservation
policies. Four guarantees would be lost:

- orbax renames a checkpoint as soon as it has written it, before digests can be computed. A process
  killed between the rename and the digests would leave a named checkpoint without digests. orbax
  also flushes neither its JSON files nor the folder, so that a power failure may leave a named
  checkpoint with empty files.
- `LatestN` and `BestN` know steps and metrics, and no digests. They would count a damaged
  checkpoint among the newest, and delete a whole one for it. With `keep=1` they would delete the
  checkpoint before as soon as the newest is written, and not after a later step has finite metrics.
- orbax deletes a checkpoint file by file, by default under its name. A process killed meanwhile
  would leave a folder that orbax takes for a checkpoint. Here the manifest is removed first, so
  that the rest of the folder is no complete checkpoint.
- If a process of several fails, orbax's barriers wait until their timeout. Here the other processes
  get the error.
"""
