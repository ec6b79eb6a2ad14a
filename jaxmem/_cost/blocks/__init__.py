"""Finds the blocks of a traced step, and the values that their backward passes read. A jaxpr goes
in (`find.py`); classes of equal blocks, each with the graph of its block, come out (`classes.py`).

Blocks are read from the step's own backward pass. The alternative is the function of each block,
which no caller passes to jaxmem. The step is traced with every tag recomputed. The backward
equation of each block then contains the whole forward of the block, the values that the derivative
reads, and the cotangents, which are the last inputs. So jaxmem plans models as they are written,
under `jax.lax.scan`, loops, `jax.jit` and `jax.shard_map`.
"""
