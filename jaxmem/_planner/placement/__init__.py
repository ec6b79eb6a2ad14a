"""Plans that place model states (ProTrain §4, with the actions of single tensors). `plan.py` reads
the step. `layer.py` and `front.py` price one layer. `program.py` is the mixed-integer program that
counts layers. `search.py` solves the program and compiles its solutions. `steps.py` and `mesh.py`
build the steps. The search runs the loop `solve_and_compile` of `_planner/search`.
"""
