"""The names of primitives that programs are read by are names of JAX's primitives."""

import importlib
import sys

from jax.extend.core import Primitive

from jaxmem._core.versions import installed, release
from jaxmem._trace import primitives

JAX = release(installed("jax") or "0")
# Names that the installed JAX may lack, and whether it has them.
OTHERS = {
    "closed_call": JAX < (0, 11),
    "one_minus_square": JAX >= (0, 11),
    "triton_kernel_call": False,  # of jax-triton
}


def test_names_are_those_of_primitives():
    for module in ("jax.experimental.pallas", "jaxmem._model.tags.primitive"):
        importlib.import_module(module)
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in ("jax", "jaxmem")]
    known = {p.name for m in modules for p in vars(m).values() if isinstance(p, Primitive)}
    lists = {name: value for name, value in vars(primitives).items() if name.isupper()}
    assert len(lists) > 10
    listed = frozenset().union(*lists.values())
    assert sorted(listed - known) == sorted(name for name, has in OTHERS.items() if not has)
