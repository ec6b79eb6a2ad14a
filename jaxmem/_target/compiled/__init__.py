"""Reads bytes, FLOPs and transfers of a compiled step into a `Compiled` (`compiled.py`).

One compile gives both bytes and time. XLA writes its time estimates into the text of the program
whose bytes are read; the option `xla_gpu_collect_cost_model_stats` changes no byte. XLA has no
estimate for matrix products in Triton's fusions before they are tuned. A formula, fitted to XLA's
table of measured products, prices these products (`benchmarks/estimates.py`).

The alternative was a second compile without Triton's products. The second compile took as long
again, and described a program that does not run.
"""
