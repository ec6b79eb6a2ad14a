"""Scripts that measure what the project claims: `python -m benchmarks.NAME` writes
benchmarks/results/NAME.json. A script has its cases in a table at its top, a function that measures
one case, and `summary`, or `of_case` for each case, which reads nothing but the results.

The scripts have six shapes. What the scripts of a shape share is in a file of `benchmarks/shared/`:

| Shape | Scripts | Shared |
|---|---|---|
| plans over a range of budgets | budgets, tpu_budgets, auto_tags, foreign, least, ablations, plan_seconds | `case.py` |
| plans against policies, at the policies' bytes | baselines_cpu, baselines_h200, tpu_baselines, measured, stack_bytes, stack_time | `baselines.py`, `timing.py` |
| predicted against compiled, measured or exact | profile_exact, exactness, quality, solver, time_rank, step_times, time_choices, time_spread, product_times, walk, codecs, tpu_codecs | `assignments.py`, `steps.py` |
| AdamA against other optimizers | adama_bytes, adama_bert_4b, adama_largest, adama_table2, adama_time, adama_convergence, adama_ratio, adama_packed | `devices.py`, `packed.py` |
| states placed in host memory or divided | placed, placed_rules, placed_times, protrain_table, streamed_bytes, streamed_largest, largest, sharded | `released.py` |
| faults, interruptions, changes while training | bad_files, checkpoint_faults, kills, saving, rectified | `case.py` |

`results.py` writes the results of all. `stale.py` lists results whose sources changed since.
"""  # noqa: E501
