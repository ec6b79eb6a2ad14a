"""Estimates the memory of a step from its trace: which values XLA writes, in which order, and how
many bytes are live at once.

The estimate fuses the equations of a traced step as XLA does, puts the kernels in the orders of
XLA's schedulers, and counts the live bytes. An estimate takes a tenth of a second where a compile
takes ten seconds. So the solver is called again after each estimate, and a search compiles only
assignments on which the solver and the estimate agree.

Before, working memory was predicted as a share of each recomputed tensor's bytes. That share knew
neither the head nor which tensors are live at the same time.

The estimate is made of the whole step as `build` returns it. The alternative is the graph of one
block. From the whole step, the memory of microbatches, chunked losses and optimizers follows
without code for each of them.

An estimate is no bound: XLA fuses and schedules by cost models of its own. Compiles correct the
estimates.
"""
