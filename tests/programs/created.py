"""Run by test_created.py on several CPU devices: states that are made a layer at a time, each
device's part, beside the same states made whole and divided then.

    python -m tests.shared.worker tests.programs.created AXES WAYS

AXES is "auto" or "explicit", WAYS some keys of `WAYS` with commas between them. Prints, as JSON, an
entry for each: how far the state is from the other, the arrays that lie otherwise, and where one
step is made, how far its parameters are from the other's, and have moved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.shared import meshes, tiny_lm
from tests.shared.compare import farthest
from tests.shared.meshes import placed

LAYERS = 3
HOST = {"persist": 1, "copies": 1, "outer_moments": "pinned_host"}
RESIDENT = {"persist": LAYERS}
# The optimizer, what is divided (None: no mesh is named), and where the layers lie.
WAYS = {
    "adama": ("adama", "states", HOST),
    "row": ("row", "states", HOST),
    "resident": ("adama", "states", RESIDENT),
    "moments": ("adama", "moments", RESIDENT),
    "nothing": ("adama", "nothing", {"persist": 0}),
    "whole": ("lion", None, {"persist": 1}),
    "lion": ("lion", "states", HOST),
    "slow": ("slow", "states", {"persist": 0}),
}


def slow():
    """SGD, and a mean of the parameters, whose first value is theirs."""

    def update(updates, state, params):
        del params
        return updates, {**state, "count": state["count"] + 1}

    ones = lambda params: jax.tree.map(jnp.ones_like, params)
    init = lambda params: {"slow": params, "count": jnp.int32(0), "ones": ones(params)}
    return optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.01))


def drawn(key, i):
    """A layer: small numbers that depend on all of its shape."""
    a, b = jax.random.split(jax.random.fold_in(key, i))
    return {
        "bias": jax.random.normal(a, (5,)) / 10,  # which no device has a part of
        "down": jax.random.normal(a, (32, 16)) / 4,
        "up": jax.random.normal(b, (16, 32)) / 4,
    }


def block(p, x, *shared):
    return tiny_lm.block({"down": p["down"], "up": p["up"]}, x, *shared) + p["bias"].sum()


def adama(second_moment: str):
    options = {"eps": 1e-3, "axis_name": "data", "second_moment": second_moment}
    return tiny_lm.released(jaxmem.adama(0.01, **options), block)


OPTIMIZERS = {
    "adama": lambda: adama("squares"),
    "row": lambda: adama("row"),
    "lion": lambda: tiny_lm.released(optax.lion(0.01), block, axis_name="data"),
    "slow": lambda: tiny_lm.released(slow(), block, axis_name="data"),
}


def whole(mesh, step, divided, how):
    """The state that is made whole, then divided, then split."""
    key = jax.random.key(3)
    layers = jax.jit(lambda: jax.vmap(lambda i: drawn(key, i))(jnp.arange(LAYERS)))()
    params = tiny_lm.parameters(np.float32, width=16, vocab=32) | {"blocks": layers}
    return step.split(meshes.state(step, params, mesh, divided or "nothing"), **how)


def made(mesh, step, divided, how):
    key = jax.jit(lambda: jax.random.key(3), out_shardings=NamedSharding(mesh, P()))()
    outer = tiny_lm.parameters(np.float32, width=16, vocab=32)
    del outer["blocks"]
    layer = lambda i: drawn(key, i)
    if divided is None:
        outer = jax.tree.map(lambda a: placed(a, mesh), outer)
        return step.create(outer, layer, LAYERS, **how)
    # Arrays of NumPy, of one device, of all devices.
    outer |= {"final": np.asarray(outer["final"]), "scale": placed(outer["scale"], mesh)}
    return step.create(outer, layer, LAYERS, **how, mesh=mesh, divided=divided)


def compared(mesh, name: str, divided: str | None, how: dict) -> dict:
    step = OPTIMIZERS[name]()
    want, got = whole(mesh, step, divided, how), made(mesh, step, divided, how)
    lies = lambda a: (a.shape, a.dtype, a.sharding.memory_kind)
    alike = lambda a, b: lies(a) == lies(b) and a.sharding.is_equivalent_to(b.sharding, a.ndim)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    apart = [jax.tree_util.keystr(path) for (path, a), b in pairs if not alike(a, b)]
    first = jax.tree.map(np.asarray, want)
    found = {"apart": apart, "far": farthest(got, first)}
    if divided == "states":
        call = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
        tokens = tiny_lm.tokens(2 * mesh.shape["data"], vocab=32).astype(jnp.int32)
        batch = placed(tokens, mesh, P("data"))
        (got, _), (want, _) = (jax.tree.map(np.asarray, call(s, batch)[0]) for s in (got, want))
        found["stepped"] = farthest(got, want)
        found["moved"] = farthest(got, first[0])
    return found


def main(axes: str, ways: str):
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axes]
    shape = (2, jax.device_count() // 2)  # over the first axis states are copied
    mesh = jax.make_mesh(shape, ("copies", "data"), axis_types=(kind, kind))
    found = {way: compared(mesh, *WAYS[way]) for way in ways.split(",")}
    return {"devices": jax.device_count(), "found": found}
