"""Finds a plan. `build`, the step's arguments, a budget and a target go in; a `Plan` or an error
comes out. Users call `plan.py`, `jit.py`, `frontier.py`, `verify.py`, `user_assignments.py` and
`explain`. `search` is the search over actions, and `solve` its mixed-integer program. `placement`
is the search over actions and the places of model states, with its mixed-integer program. `outcome`
makes the plan or the error.

"The way of a plan" in CONTRIBUTING.md lists the six objects from a traced step to a plan.

Where to look if a prediction is wrong:

    bytes, GPU or CPU           _trace/liveness/ (the estimate); solve/memory.py and
                                solve/additive.py (the model that is fitted to compiles)
    bytes, TPU                  _target/buffers/assignment.py (buffers that libtpu assigns),
                                _target/devices/tiles.py; BUFFERS_DIFFER in search/search.py
    seconds of one tensor       _cost/profile/times.py (roofline, timing), _cost/profile/options.py
    seconds, named TPU          _target/hlo/roofline.py
    seconds, named GPU          _target/hlo/costs.py (XLA's estimates)
    order of two plans          search/step_time.py, search/factors.py, _cost/profile/doubt.py
    host transfers              _target/hlo/transfers.py, `host_seconds` in solve/cost.py
    a stored plan is not found  recall.py (the key), search/history.py

A tensor is offloaded if the target can offload (`allowed_actions`), if its block can (`no_offload`
and `in_loops` in `_cost/profile/profile.py`; `_cost/profile/options.py` lists the option), and if
the solver picks the option (`MixedIntegerProgram`). Local search, changes by whole steps, and
measured comparisons may pick the option too. The policy of the tensor's block carries the choice
out (`_model/tags/policy.py`). If a plan places model states too, `placement/program.py` replaces
`MixedIntegerProgram`, and `placement/search.py` replaces `Search`.
"""
