"""Plans that place model states (ProTrain §4, with the actions of single tensors): `plan.py` reads
the step, `layer.py` and `front.py` price one layer, `program.py` is the mixed-integer program that
counts layers, `search.py` solves it and compiles its solutions, and `steps.py` and `mesh.py` build
the steps. The loop of the search is that of `_planner/search` (`solve_and_compile`).
"""
