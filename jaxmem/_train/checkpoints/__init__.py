"""Checkpoints on disk: saved states, and digests of their files, by which damage is detected.

A checkpoint gets its name last. orbax writes each array under a number, so that reading a
checkpoint needs no tree from the user. The manifest has the names and shapes of the arrays. Then
digests of all files are computed, all files are flushed, and the folder is renamed. So a folder
with a step's name was complete once; if it is not complete, it is reported as damaged. A killed
process leaves a folder of another name, which is not reported.

The alternative is orbax's CheckpointManager (0.12.8), with its atomic rename and its preservation
policies. Four guarantees would be lost:

- orbax renames a checkpoint as soon as it has written it, before digests can be computed. A process
  killed between the rename and the digests would leave a named checkpoint without digests. orbax
  also flushes neither its JSON files nor the folder, so that a power failure may leave a named
  checkpoint with empty files.
- `LatestN` and `BestN` use steps and metrics, and no digests. They would count a damaged checkpoint
  among the newest, and delete a complete checkpoint in its place. With `keep=1` they would delete
  the previous checkpoint once the newest is written, before a later step has finite metrics.
- orbax deletes a checkpoint file by file, by default under its name. A process killed during the
  deletion would leave a folder that orbax takes for a checkpoint. Here the manifest is removed
  first, so that the rest of the folder is no complete checkpoint.
- If a process of several fails, orbax's barriers wait until their timeout. Here the other processes
  get the error.
"""
