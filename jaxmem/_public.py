"""The public names of `jaxmem`, each imported from the file that defines it.

A name X is public if this file has a line `X as X`. This file imports JAX, so `import jaxmem` loads
this file only when a public name is first used.
"""

from jaxmem import codecs as codecs
from jaxmem import errors as errors
from jaxmem import layers as layers
from jaxmem import ops as ops
from jaxmem import plans as plans
from jaxmem import runs as runs
from jaxmem._model.auto.auto import auto as auto
from jaxmem._model.loop.stack import stack as stack
from jaxmem._model.tags.policy import remat_policy as remat_policy
from jaxmem._model.tags.tag import tag as tag
from jaxmem._optim.adama.eight_bits import quantized as quantized
from jaxmem._optim.adama.transform import adama as adama
from jaxmem._optim.adama.transform import adamaw_a as adamaw_a
from jaxmem._optim.adama.transform import scale_by_adama as scale_by_adama
from jaxmem._optim.released.released import released_step as released_step
from jaxmem._planner.explain.explain import explain as explain
from jaxmem._planner.jit import jit as jit
from jaxmem._planner.plan import plan as plan
from jaxmem._planner.verify import verify as verify
from jaxmem._result.plan.plan import Plan as Plan
