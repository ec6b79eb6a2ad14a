"""The commands of `jaxmem`: a command line goes in; text, files and an exit code come out.

`parser.py` reads the command line. `entry.py` finds the user's step. `steps.py`, `plans.py` and
`machine.py` run the commands. `output.py` and `tables.py` print results, and `errors.py` makes
messages of errors. Commands about plans' files, and `--help`, import no JAX.
"""
