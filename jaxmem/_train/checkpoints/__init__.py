"""Checkpoints on disk: saved states, and the digests by which a whole checkpoint is known.

A checkpoint gets its name last. orbax writes the arrays, each under a number, so that reading them
needs no tree of the user's; the manifest holds their names and shapes. Then all files are summed
and flushed, and the folder is renamed. So a folder with a step's name was whole once, and is
reported as damaged if it is not. A process that was killed leaves a folder of another name, which
is not reported.
"""
