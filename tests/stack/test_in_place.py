"""What a stack folds into is updated where it lies: no layer of it is copied before."""

import re

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

import jaxmem

LAYERS, WIDE, NARROW = 3, 35, 33


def copies(text: str, shape: str) -> list[str]:
    """The instructions outside of fusions whose result has this shape."""
    found, fused = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            fused = line.lstrip().startswith("%fused")
        result = re.match(r"\s+(?:ROOT )?%?\S+ = (\w+\[[\d,]*\])\S* (\S+)\(", line)
        of_data = result and result[2] not in ("parameter", "get-tuple-element", "bitcast")
        if of_data and not fused and result[1] == shape:
            found.append(line)
    return found


def compiled(fold) -> str:
    """A gradient of a stack. Moments alone are float64."""
    block = lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"]
    make = lambda dtype: {
        "up": jnp.ones((LAYERS, NARROW, WIDE), dtype),
        "down": jnp.ones((LAYERS, WIDE, NARROW), dtype),
    }

    def step(moments, params, x):
        run = lambda moments, x: jaxmem.stack(block, params, x, moments=moments, fold=fold).sum()
        return jax.grad(run)(moments, x)

    args = make(jnp.float64), make(jnp.float32), jnp.ones((4, NARROW), jnp.float32)
    return jax.jit(step, donate_argnums=0).lower(*args).compile().as_text()


def added(moments, gradient):
    return jax.tree.map(lambda m, g: m + g.astype(m.dtype), moments, gradient)


def turned(moments, gradient):
    """What cannot be updated in place: so the test sees a copy where there is one."""
    return added(jax.tree.map(lambda m: m[::-1, ::-1], moments), gradient)


def test_no_layer_is_copied_before_it_is_updated(optimized):
    text = compiled(added)
    assert "dynamic-update-slice" in text
    for shape in (f"{NARROW},{WIDE}", f"{WIDE},{NARROW}"):
        assert copies(text, f"f64[1,{shape}]") == copies(text, f"f64[{shape}]") == []
    behind = compiled(turned)
    assert any(copies(behind, f"f64[{one}{NARROW},{WIDE}]") for one in ("1,", ""))


def test_a_fold_that_cannot_be_mapped_runs_as_it_is():
    seen = []

    def fold(moments, gradient):
        io_callback(lambda a: seen.append(a.shape), None, gradient["up"], ordered=True)
        return added(moments, gradient)

    args = (jnp.zeros((LAYERS, 2, 2)), jnp.ones((LAYERS, 2, 2)), jnp.ones((4, 2)))
    block = lambda p, x: x + jnp.tanh(x @ p["up"])

    def step(fold):
        run = lambda moments: jaxmem.stack(
            block, {"up": args[1]}, args[2], moments={"up": moments}, fold=fold
        ).sum()
        return jax.grad(run)(args[0])

    got, want = step(fold), step(added)
    jax.effects_barrier()
    assert seen == [(2, 2)] * LAYERS
    assert (got == want).all()
    assert (got != 0).all()
