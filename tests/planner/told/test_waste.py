"""plan() calls a tag wasted only where saving it spares no matrix product, as products are counted
in the traced and in the compiled program.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, RECOMPUTE
from jaxmem._core.assignment import Assignment
from jaxmem._planner.search.compile import StepCompiler
from jaxmem._target.compile.backend import backend_for
from jaxmem._target.devices.target import Target
from jaxmem.errors import JaxmemWarning
from tests.shared import models
from tests.shared.audit import audit
from tests.shared.deviceless import spec

pytestmark = pytest.mark.jax_defaults
LAYERS, WIDTH, HEADS = 4, 32, 4
WIDTHS = {"qkv": (WIDTH, 96), "out": (WIDTH, WIDTH), "up": (WIDTH, 128), "down": (128, WIDTH)}
SHAPES = {name: spec(LAYERS, *sizes) for name, sizes in WIDTHS.items()}, spec(2, 16, WIDTH)


def layer(x, p, _, tagged=False):
    """A ViT's: attention without a tag, and the residual after it with one.

    tagged: whether tensors that the backward reads of the attention have tags too.
    """
    tag = jaxmem.tag if tagged else lambda a, name: a
    softmax = functools.partial(jaxmem.ops.softmax, name="probs") if tagged else jax.nn.softmax
    x = jaxmem.tag(x, "in", kind="residual")
    qkv = tag(models.norm(x) @ p["qkv"], "qkv").reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = (qkv[:, :, i] for i in range(3))
    probs = softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    mixed = tag(jnp.einsum("bhqk,bkhd->bqhd", probs, v).reshape(x.shape), "mixed")
    x = jaxmem.tag(x + mixed @ p["out"], "mid", kind="residual")
    up = jaxmem.tag(models.norm(x) @ p["up"], "up", kind="linear")
    return x + jax.nn.gelu(up) @ p["down"]


def products(build, choices) -> tuple[int, int]:
    """Matrix products of a step under these choices: as traced, of the blocks' backward; and as
    compiled, of all.
    """
    actions = {"block": choices}
    with backend_for(Target.parse("local")) as backend:
        steps = StepCompiler(build, SHAPES, backend)
        traced = audit(steps.trace(Assignment(actions))).matmuls
        (step,) = steps.compile_buffers(actions)
    return traced, step.compiled.matmuls


def warned(build) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jaxmem.plan(build, *SHAPES)
    return [str(w.message) for w in found if issubclass(w.category, JaxmemWarning)]


def test_a_tag_that_spares_a_product_is_not_called_waste():
    build = models.build_of(layer)
    with_it = products(build, {"in": KEEP, "mid": KEEP, "up": KEEP})
    without = products(build, {"in": KEEP, "mid": RECOMPUTE, "up": KEEP})
    assert without[0] - with_it[0] == LAYERS, "the attention's last product of each layer"
    assert without[1] - with_it[1] == LAYERS
    messages = warned(build)
    assert [m for m in messages if "recomputed all the same" in m] == []
    # What is said instead is true: the attention's other products are repeated.
    (message,) = messages
    assert "3 matrix products before tag 'mid' of block 'block' are recomputed" in message
    tagged = models.build_of(functools.partial(layer, tagged=True))
    assert with_it[0] - products(tagged, ALL)[0] == 3 * LAYERS


ALL = dict.fromkeys(("in", "qkv", "probs", "mixed", "mid", "up"), KEEP)


def test_a_tag_that_spares_no_product_is_called_waste():
    def late(x, p, _):
        x = jaxmem.tag(x, "in", kind="residual")
        h = jaxmem.tag(jax.nn.softmax(x @ p["out"]), "late", kind="softmax")
        return x + h @ p["out"]

    build = models.build_of(late)
    kept = products(build, {"in": KEEP, "late": KEEP})
    assert kept == products(build, {"in": KEEP, "late": RECOMPUTE})
    (message,) = warned(build)
    assert "tag 'late' of block 'block' is saved" in message
    assert "recomputed all the same" in message
