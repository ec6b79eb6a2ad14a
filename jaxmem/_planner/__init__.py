"""Finds a plan. Users call `plan.py`, `frontier.py`, `verify.py`, `user_assignments.py` and
`explain`. `search` is the search over actions, and `solve` its mixed-integer program. `placement`
is the search over actions and the places of model states, with its mixed-integer program. `outcome`
makes the plan or the error.

A plan is made in six steps, each with one type of object:

    object          defined in                made by
    TracedStep      traced_step.py            `read_step`: the user's step, traced, with its Profile
    Search          search/state.py           `TracedStep.search`: limits, compiles, fitted models
    ActionProblem   solve/problem.py          `Search.problem`; `begin` for the first guess;
                                              callers without a byte limit call the class
    ActionSolution  solve/solution.py         `priced`: an assignment of choices with its price
    Trial           search/trial.py           `Search.compile_solutions`: a compiled solution; also
                                              `begin`, `divide`, `refine_by_whole_steps`, and
                                              `price` for an assignment that a user wrote
    Plan            _result/plan/plan.py      `outcome` (outcome/): the fastest trial that fits

A tensor is offloaded if the target can offload (`allowed_actions`), if its block can (`left_out`
and `looped` in `_cost/profile/profile.py`; `options.py` there gives the tag an option), and if the
solver picks the option (`MixedIntegerProgram`). Local search, changes by whole steps, and measured
comparisons may pick the option too. The policy of the tensor's block carries the choice out
(`_model/tags/policy.py`). If a plan places model states too, `placement/program.py` decides, and
`placement/search.py` takes the place of `Search`.
"""
