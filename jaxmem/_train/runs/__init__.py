"""The training loop that resumes after every stop, and the folder of a run."""
