"""The training loop that resumes after every stop, and the folder of a run.

A run goes back to a checkpoint if a loss is not finite. The alternative is an update with a guard.
A step that keeps the old state if a loss is not finite would hold both states, and would no longer
be the step that was planned. Going back costs the steps since the last checkpoint, and costs
nothing while every loss is finite.

If a state is damaged, the step before it is left out (`cause_of` in `loop.py`). The metrics of a
step describe the state before the step's update, so that a checkpoint may hold a damaged state of
which no row warns. Steps that run again give the same results, so an older checkpoint alone leads
to the same state. The alternative is to look at every array before it is saved. That would take
states that are infinite on purpose for damaged ones, and would miss states that only lead to
infinities.
"""
