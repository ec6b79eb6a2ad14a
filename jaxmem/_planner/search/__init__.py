"""The search over actions: solves for assignments that may fit, compiles them, corrects the memory
model by the compiled bytes, and solves again. A profile, limits and a compiler of the step go in
(`Search` in `state.py`); the best compiled `Trial` comes out.

Plans are compared with the baseline "everything kept": the step without any checkpoint, with
untagged tensors kept too. Under `jaxmem.auto`, a layer with everything kept runs the author's own
operations, inlined, without `jax.checkpoint`. The alternative baseline keeps every tag and
recomputes the rest. This assignment is a plan like any other, and often takes half as many bytes.

Keeping a tensor takes time too, so a plan may be faster than the step without a plan. The search
then returns the plan even if the step without a plan fits. But a roofline's times never change a
step that fits; only measured times and XLA's estimates do. The best plan of a smaller budget
remains a candidate. So the predicted time never rises with the budget, except by the error bounds
of lossy codecs (`_cost/profile/doubt.py`).
"""
