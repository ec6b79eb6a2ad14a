"""Scripts that measure what the project claims. `python -m benchmarks.SCRIPT [RESULT ...]` writes
benchmarks/results/RESULT.json for each result of the script, or for the named ones.

The table `RESULTS` of a script has a `Benchmark` for each result: the table of its cases, the
function that measures one case, and the summary, which reads nothing but the rows. The docstring of
a script says what each result measures, and against which baseline.

The scripts have six shapes. What the scripts of a shape share is in a file of `benchmarks/shared/`:

| Shape | Scripts | Shared |
|---|---|---|
| plans over a range of budgets | budgets, ablations, batches | `case.py` |
| plans against policies, at the policies' bytes | policies | `assignments.py`, `timing.py` |
| predicted against compiled, measured or exact | estimates, times, exactness, published, slices, gpu, tpu_codecs | `assignments.py`, `steps.py` |
| AdamA against other optimizers, moments in 8 bits | adama, moments | `devices.py`, `timing.py` |
| states placed in host memory, divided, or frozen | placed, fine_tuning | `released.py` |
| faults, interruptions, changes while training | faults, runs, processes | `case.py`, `timed_run.py` |

`results.py` runs the benchmarks and writes their results. `stale.py` lists results whose sources
changed since.
"""  # noqa: E501
