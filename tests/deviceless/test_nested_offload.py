"""Offload in a loop in a loop, for a TPU: XLA does not compile it, so that a plan leaves it out.

AI-Hypercomputer/maxtext #4995 is the report. If a test here says that XLA compiles it, delete the
rule (`offloads_nested` in `jaxmem/_target/devices/platforms.py`).
"""

import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import ALL, Action
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.profile import profile
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.compile.protocol import Pricing
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import JaxmemWarning, StepError
from jaxmem.plans import Assignment

pytestmark = pytest.mark.jax_defaults
OUTER, INNER, WIDTH, ROWS = 4, 3, 512, 4096


def layer(h, w):
    up = jaxmem.tag(h @ w[0], "up")
    return h + jnp.tanh(up) @ w[1], None


def step_of(layout: str):
    """`build` of a step; the layout says where loops and blocks stand, the outermost first."""

    def build(plan):
        block = lambda f: jax.checkpoint(f, policy=jaxmem.remat_policy(plan), prevent_cse=False)
        flat = lambda w: jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w)

        def run(w, x):
            match layout:
                case "scan, block":
                    return jax.lax.scan(block(layer), x, flat(w))
                case "scan, scan, block":
                    inner = lambda h, ws: jax.lax.scan(block(layer), h, ws)
                    return jax.lax.scan(inner, x, w)
                case "scan, block, scan":
                    return jax.lax.scan(block(lambda h, ws: jax.lax.scan(layer, h, ws)), x, w)
                case "block, scan":
                    return block(lambda h, ws: jax.lax.scan(layer, h, ws))(x, flat(w))
                case _:
                    raise AssertionError(layout)

        loss = lambda w, x: (run(w, x)[0].astype(jnp.float32) ** 2).mean()
        return lambda w, x: jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w, x))

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    w = shape(OUTER, INNER, WIDTH, 4 * WIDTH), shape(OUTER, INNER, 4 * WIDTH, WIDTH)
    return build, (w, shape(ROWS, WIDTH))


NESTED = ("scan, scan, block", "scan, block, scan")
SINGLE = ("scan, block", "block, scan")


@pytest.mark.core
@pytest.mark.parametrize(
    ("layout", "target", "offloads"),
    [
        *((layout, "v5e", True) for layout in SINGLE),
        *((layout, "v5e", False) for layout in NESTED),
        ("scan, block", "h200", True),
        ("block, scan", "h200", False),
        ("scan, scan, block", "h200", False),
    ],
)
def test_a_plan_leaves_out_what_a_loop_in_a_loop_offloads(layout, target, offloads):
    build, args = step_of(layout)
    with todays_checkpoint():
        _, traced = trace(build, Assignment.nothing(), args)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", JaxmemWarning)
        made = profile(traced.jaxpr, Pricing(Target.parse(target)), Allowed(ALL, ALL))
    actions = {o.choice.action for b in made.blocks for t in b.tags for o in t.options}
    assert (Action.OFFLOAD in actions, Action.COMPRESS_OFFLOAD in actions) == (offloads, offloads)
    assert any("offload is left out" in str(w.message) for w in said) == (not offloads)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*NESTED, *SINGLE])
def test_xla_compiles_offload_of_single_loops_alone(layout):
    build, args = step_of(layout)
    offload = Assignment(others={"up": "offload"})
    with backend_for(Target.parse("v5e"), workers=1) as backend:
        compiling = backend.compile_fully(*trace(build, offload, args))
        if layout in NESTED:
            with pytest.raises(StepError, match="operand 0 to match the async shape"):
                compiling.result()
        else:
            assert compiling.result().host_bytes == OUTER * INNER * ROWS * 4 * WIDTH * 2
