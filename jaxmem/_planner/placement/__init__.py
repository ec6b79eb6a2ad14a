"""Plans that place model states (ProTrain §4, with the actions of single tensors). A released step
goes in; a plan with actions, places of states and a division over devices comes out.

`plan.py` reads the step. `layer.py` and `front.py` price one layer. `program.py` is the
mixed-integer program, whose variables are numbers of layers. `search.py` solves the program and
compiles its solutions, in the loop `solve_and_compile` of `_planner/search/trial.py`. `steps.py`
and `mesh.py` build the steps.
"""
