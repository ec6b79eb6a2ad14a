"""Finds a plan. Users call `plan.py`, `verify.py`, `hand` and `explain`. `search` is the search
over actions, and `solve` its mixed-integer program. `placement` is the search over actions and the
places of model states, with its mixed-integer program. `outcome` makes the plan or the error.

A plan is made in six steps. Each step makes one object, in one place:

    TracedStep      read.py             the user's step, traced, with its blocks priced (Profile)
    Search          search/state.py     the limits, the compiles, and the models fitted to them
    ActionProblem   solve/problem.py    the input of the solver: choices, prices, byte limits
    ActionSolution  solve/solution.py   an assignment of choices with its price
    Trial           search/trial.py     a compiled solution (CompiledStep)
    Plan            outcome/            the fastest trial that fits, as the user gets it

A tensor is offloaded if the target can offload (`allowed_actions`), if its block can
(`_cost/profile/options.py` gives the tag an option), and if the solver picks the option
(`MixedIntegerProgram`). Local search, changes by whole steps, and measured comparisons may pick the
option too. The policy of the tensor's block carries the choice out (`_model/tags/policy.py`). If a
plan places model states too, `placement/program.py` decides, and `placement/search.py` takes the
place of `Search`.
"""
