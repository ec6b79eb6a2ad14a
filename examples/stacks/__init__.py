"""Training stacks, one script for each: the library's own step, and the changed line.

`training.py` compares a step under the library's own jit with the step under `jaxmem.jit`.
`make stacks` installs the libraries and runs the scripts.
"""
