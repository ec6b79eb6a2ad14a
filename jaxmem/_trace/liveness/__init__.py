"""Estimates the memory of a step from its trace. A jaxpr and the donated arguments go in; the bytes
that the step takes in addition to its arguments come out (`walk.py`).

The estimate groups the equations of a traced step into kernels, as XLA fuses them (`kernels.py`),
orders the kernels as XLA's schedulers do (`order.py`), and counts the live bytes. An estimate takes
a tenth of a second where a compile takes ten seconds. So the solver is called again after each
estimate, and a search compiles only assignments on which the solver and the estimate agree.

Before, working memory was predicted as a share of each recomputed tensor's bytes. That prediction
considered neither the head nor which tensors are live at the same time.

The whole step is estimated, as `build` returns it. The alternative is the graph of one block. From
the whole step, the memory of microbatches, chunked losses and optimizers follows without code for
each of them.

An estimate is no bound: XLA fuses and schedules by cost models of its own. Compiles correct the
estimates.
"""
