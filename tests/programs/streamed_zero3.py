"""Run by test_streamed_sharded.py on several CPU devices: how far a ZeRO-3 step with states in host
memory is from the resident one, as JSON.

python -m tests.shared.worker tests.programs.streamed_zero3 [meshes]

Also how far a split state in device memory, whose moments alone are divided over one of two axes,
is from one that is not split. With "meshes" instead: over one of a mesh's two axes, and over an
explicit one, beside a mesh of one axis.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.shared import meshes, tiny_lm
from tests.shared.compare import farthest
from tests.shared.streamed import on_device

LAYERS, N, STEPS = 4, 2, 4


def released(moment: str = "squares"):
    # A larger eps, so that rounding is not magnified where a gradient is nearly zero.
    options = {"eps": 1e-3, "weight_decay": 0.1, "accumulation_steps": N, "axis_name": "data"}
    tx = jaxmem.adamaw_a(0.01, second_moment=moment, **options)
    return tiny_lm.released(tx, clip=("component", 0.1))


def first_state(step, mesh, persist: int, divided: str = "states", moved: bool = True):
    """The split state; `moved`: whether the layers beyond `persist` are in host memory."""
    params = tiny_lm.parameters(np.float32, layers=LAYERS, width=16, vocab=32)
    state = step.split(meshes.state(step, params, mesh, divided), persist)
    return state if moved else on_device(state)


def train(mesh, persist: int, divided: str = "states", moved: bool = True, moment: str = "squares"):
    """Joined state and metrics, and the places of the layers' parameters."""
    step = released(moment)
    state = first_state(step, mesh, persist, divided, moved)
    call, found = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0), []
    for seed in range(STEPS):
        batch = tiny_lm.tokens(2 * N * mesh.shape["data"], seed, vocab=32).astype(jnp.int32)
        state, metrics = call(state, meshes.placed(batch, mesh, P("data")))
        found.append(metrics)
    leaves = jax.tree.leaves(state[0]["blocks"])
    places = sorted({f"{a.sharding.memory_kind} {a.sharding.spec}" for a in leaves})
    return jax.tree.map(np.asarray, (step.joined(state), found)), places


def refused(mesh, divided: str) -> str:
    """The error of a data-parallel step that does not divide its states."""
    step = released()
    batch = tiny_lm.tokens(2 * N * jax.device_count(), vocab=32)
    try:
        jax.eval_shape(step.data_parallel(mesh, divided), first_state(step, mesh, 1), batch)
    except jaxmem.errors.OptimizerError as error:
        return str(error)
    return ""


def of_half():
    """One of half of the devices, an explicit one of them, and one of two axes."""
    half, auto = jax.devices()[: jax.device_count() // 2], (AxisType.Auto,)
    make = lambda types: jax.make_mesh((len(half),), ("data",), axis_types=types, devices=half)
    both = jax.make_mesh((len(half), 2), ("data", "model"), axis_types=2 * auto)
    return make(auto), make((AxisType.Explicit,)), both


def of_divided_moments() -> float:
    alone, _, both = of_half()
    split, _ = train(both, 1, "moments", moved=False)
    whole, _ = train(alone, LAYERS, "moments", moved=False)
    return farthest(split, whole)


def over_meshes() -> dict:
    alone, explicit, both = of_half()
    want, _ = train(alone, 1)
    found = {}
    for name, mesh in {"two axes": both, "explicit": explicit}.items():
        got, places = train(mesh, 1)
        found[name] = {"far": farthest(got, want), "places": places}
    return found


def main(which: str = ""):
    if which == "meshes":
        return over_meshes()
    mesh = meshes.line()
    want, _ = train(mesh, LAYERS)
    found = {}
    for persist in (0, 1):
        got, places = train(mesh, persist)
        found[persist] = {"far": farthest(got, want), "places": places}
    by_layer, _ = train(mesh, LAYERS, "layers")
    errors = {divided: refused(mesh, divided) for divided in ("nothing", "moments")}
    found = {"devices": jax.device_count(), "found": found, "errors": errors}
    found["by layer"] = farthest(by_layer, want)
    streamed, resident = (train(mesh, k, moment="row")[0] for k in (1, LAYERS))
    found["row"] = farthest(streamed, resident)
    return found | {"moments": of_divided_moments()}
