"""JAX's next checkpoint, for one test: the options `jax_remat3` and `jax_custom_vjp3`."""

import jax
import pytest

from jaxmem._core.database import Database
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from tests.shared import options as jax_options

REASON = "the option is refused before 0.12"
needed = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason=REASON)
NEXT = ("jax_remat3", "jax_custom_vjp3")


def options(*names: str):
    """JAX's options of these names are on."""
    return jax_options.options(**dict.fromkeys(names, True))


def both(make):
    """Returns the results of `make()` with the options off and with the options on."""
    off = make()
    with options(*NEXT):
        return off, make()


def compiled(build, args, plan, target="local"):
    """Bytes of the step that a search compiles; the program too, on the device at hand."""
    with backend_for(Target.parse(target), Database()) as backend:
        steps = StepCompiler(build, args, backend)
        result = backend.compile_fully(*steps.stages(plan)).result()
    return result.total_bytes, result.host_bytes, result.executable
