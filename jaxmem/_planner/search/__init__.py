"""The search over actions: solves for assignments that may fit, compiles them, corrects the memory
model by the compiled bytes, and solves again.

"Everything kept" means the step without any checkpoint, with untagged tensors kept too. It is the
baseline that a plan is compared with. Under `jaxmem.auto`, a layer whose plan keeps everything is
the author's own operations, inlined, under no `jax.checkpoint`. The alternative baseline is the
assignment that keeps every tag and recomputes the rest. That assignment is a plan like any other,
and often takes half as many bytes.

A plan may be faster than the step without a plan, and is then returned even if that step fits,
since keeping a tensor has a price too. A step that fits is changed only by times that were measured
or estimated by XLA, not by times of a roofline. The best plan of a smaller budget remains a
candidate. So the predicted time never rises with the budget, except by the error bounds of lossy
codecs (`_cost/profile/doubt.py`).
"""
