"""Finds a plan. `plan.py`, `verify.py`, `hand` and `explain` are what users call; `search` and
`joint` are the two searches, over actions and over placements; `solve` and `placement` are the
mixed-integer programs that the searches ask; `outcome` makes the plan or the error.

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
`joint` asks another program (`placement/program.py`).
"""
