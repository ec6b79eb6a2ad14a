"""Finds the blocks of a traced step, and the values that their backward passes read.

Blocks are read from the step's own backward pass. The alternative is the function of each block,
which no caller passes to jaxmem. The step is traced with every tag recomputed. The backward
equation of each block then holds the whole forward of the block, the values that the derivative
reads, and the cotangents, which are the last inputs. So jaxmem plans any model without a change to
how the model is written, under `jax.lax.scan`, loops, `jax.jit` and `jax.shard_map`.
"""
