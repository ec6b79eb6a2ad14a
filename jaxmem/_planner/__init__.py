"""Finds a plan. Users call `plan.py`, `verify.py`, `hand` and `explain`. `search` is the search
over actions, and `solve` its mixed-integer program. `placement` is the search over actions and the
places of model states, with its mixed-integer program. `outcome` makes the plan or the error.

The way of a plan, each object made once:

    TracedStep    read.py             the user's step, traced, with its blocks priced (Profile)
    Search        search/state.py     the limits, what was compiled, what was learned
    Problem       solve/problem.py    choices, prices and bytes that the solver decides about
    Solution      solve/solution.py   an assignment of choices with its price
    Trial         search/trial.py     a solution that was compiled (CompiledStep)
    Plan          outcome/            the fastest trial that fits, as the user gets it

A tensor is offloaded if the target can offload (`allowed_actions`), if its block can
(`_cost/profile/options.py` gives it an option), and if the solver picks that option
(`MixedIntegerProgram`), or a local search, a change by whole steps, or a measured comparison takes
it; the policy of its block then carries it out (`_model/tags/policy.py`). If states are placed too,
`placement/program.py` decides, and `placement/search.py` takes the place of `Search`.
"""
