"""What the solver prints by itself is not among a command's output."""

from tests.shared import children

# The first solver of a process prints, as highspy 1.16 does, before any option reaches it.
PROGRAM = """
import os
import highspy
import pulp

class Talks(highspy.Highs):
    made = 0

    def __init__(self):
        if not Talks.made:
            os.write(1, b"Running HiGHS\\n")
        Talks.made += 1
        super().__init__()

highspy.Highs = Talks
from jaxmem._planner.solve.solve import solved
problem = pulp.LpProblem("p", pulp.LpMinimize)
x = problem.add_variable("x", 0, 5)
problem += x
problem += x >= 2
for _ in range(2):
    assert solved(problem)
assert Talks.made >= 3, Talks.made
print(x.value())
"""


def test_a_solver_prints_no_banner():
    assert children.python("-c", PROGRAM).stdout == "2.0\n"


def test_a_process_without_standard_output_solves():
    closed = "import os\nos.close(1)\n" + PROGRAM.replace(
        "print(x.value())", "assert x.value() == 2"
    )
    children.python("-c", closed)
