"""The training loop that resumes after every stop (`loop.py`), and the folder of a run
(`folder.py`). A step, a first state and data go in (`train.py`); the state after the last step, and
a folder with plan, metrics, checkpoints and summary, come out.

A run returns to a checkpoint if a loss is not finite. The alternative is an update with a guard. A
step that keeps the old state if a loss is not finite would store both states, and would no longer
be the planned step. Returning to a checkpoint costs the steps since then, and costs nothing while
every loss is finite.

If an update has damaged the state, the step of this update is skipped (`cause_of` in `loop.py`).
The metrics of a step describe the state before the step's update, so a checkpoint may contain a
damaged state whose rows are all finite. Repeated steps give equal results, so an older checkpoint
alone leads to the same damaged state. The alternative is to check every array before it is saved.
This check would refuse states that are infinite on purpose, and would accept finite states that
lead to infinities.
"""
