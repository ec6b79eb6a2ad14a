"""Run by test_released_sharded.py: AdamA over the devices of this process, or of several, beside
one device's.

    python -m tests.shared.worker tests.programs.sharded_adama [some | PROCESS PROCESSES PORT]

Prints, as JSON, the largest difference of parameters relative to the largest parameter, by what was
tried; with `some`, each way to divide the states and each second moment once.
"""

import functools

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._optim.adama.transform import with_moments
from tests.shared import meshes, tiny_lm
from tests.shared.compare import relative

jax.config.update("jax_enable_x64", True)
N, STEPS = 2, 3


def worst(got, want) -> float:
    fetch = lambda a: np.asarray(a.addressable_data(0))
    return relative(jax.tree.map(fetch, got), want)


def batches(size):
    return [tiny_lm.tokens(size, seed) for seed in range(STEPS)]


def keys(dropout: bool) -> tuple:
    return (jax.random.key(3),) if dropout else ()


def adamaw(n: int, axis_name: str | None, moment: str):
    options = {"weight_decay": 0.1, "accumulation_steps": n, "second_moment": moment}
    return jaxmem.adamaw_a(0.01, axis_name=axis_name, **options)


@functools.cache
def alone(n: int, size: int, dropout: bool, order=lambda batch: batch, moment="squares"):
    """One device with `n` microbatches."""
    step = tiny_lm.released(adamaw(n, None, moment))
    state, call = step.init(tiny_lm.parameters()), jax.jit(step)
    for batch in batches(size):
        state, metrics = call(state, order(batch), *keys(dropout))
    return state, metrics


@functools.cache
def over(mesh, size: int, divided: str, dropout: bool, moment="squares"):
    step = tiny_lm.released(adamaw(N, "data", moment))
    state = meshes.state(step, tiny_lm.parameters(), mesh, divided)
    call = jax.jit(step.data_parallel(mesh, divided), donate_argnums=0)
    for batch in batches(size):
        state, metrics = call(state, meshes.placed(batch, mesh, P("data")), *keys(dropout))
    return state, metrics


def by_transform(mesh, size: int, checked: bool, moment: str = "squares"):
    """The transformation in a shard_map of the user's own."""
    tx = adamaw(N, "data", moment)

    def minibatch(params, state, batch):
        own = jax.lax.pcast(params, "data", to="varying")
        if checked:
            own_moments = jax.lax.pcast(state.moments, "data", to="varying")
            state = with_moments(state, own_moments)
        for part in batch.reshape(N, -1, batch.shape[1]):
            updates, state = tx.update(jax.grad(tiny_lm.loss)(own, part), state, params)
            params = optax.apply_updates(params, updates)
        # a state's own moments, equal on all devices by now
        return params, with_moments(state, jax.lax.pmean(state.moments, "data"))

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P()), "check_vma": checked}
    call = jax.jit(jax.shard_map(minibatch, mesh=mesh, **specs))
    params = jax.device_put(tiny_lm.parameters(), NamedSharding(mesh, P()))
    state = jax.device_put(tx.init(params), NamedSharding(mesh, P()))
    for batch in batches(size):
        params, state = call(params, state, batch)
    return params, state


def summed_already(mesh) -> str:
    """The error for gradients that JAX has summed over the devices."""
    tx = jaxmem.adama(0.01, axis_name="data")
    update = lambda params, batch: tx.update(
        jax.grad(tiny_lm.loss)(params, batch), tx.init(params), params
    )[0]
    sharded = jax.shard_map(update, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    try:
        jax.eval_shape(sharded, tiny_lm.parameters(), tiny_lm.tokens(8))
    except jaxmem.errors.OptimizerError as error:
        return str(error)
    return ""


def main(*arguments):
    some = arguments == ("some",)
    if len(arguments) > 1:
        meshes.join(*map(int, arguments))
    mesh = meshes.line()
    devices = jax.device_count()
    size = 2 * N * devices
    found = {}
    several = jax.process_count() > 1
    without = [] if several or some else [("", False)]  # to which several processes add nothing
    for name, dropout in (*without, (", dropout", True)):
        state, metrics = over(mesh, size, "nothing", dropout)
        want, expected = alone(N * devices, size, dropout)
        found[f"data parallel{name}"] = worst(state, want)
        found[f"metrics{name}"] = worst(metrics, expected)
    together = lambda batch: (
        batch.reshape(devices, N, -1, batch.shape[1]).swapaxes(0, 1).reshape(batch.shape)
    )
    want, expected = alone(N, size, False, together)  # microbatch i is every device's i-th
    everywhere = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))
    for divided in ("states",) if some else ("moments", "states"):
        state, metrics = over(mesh, size, divided, False)
        found[divided] = worst(everywhere(state), want)
        found[f"{divided}, metrics"] = worst(metrics, expected)
    of_rows, _ = alone(N, size, False, together, "row")
    for divided in ("moments", "layers") if some else ("moments", "states", "layers"):
        state, _ = over(mesh, size, divided, False, "row")
        found[f"{divided}, row"] = worst(everywhere(state), of_rows)
    of_rows, _ = alone(N * devices, size, False, moment="row")
    if some:
        found["transformation, row"] = worst(by_transform(mesh, size, True, "row"), of_rows)
    else:
        state, _ = over(mesh, size, "nothing", False, "row")
        found["data parallel, row"] = worst(state, of_rows)
    if not several and not some:
        want, _ = alone(N * devices, size, False)
        explicit = meshes.line(AxisType.Explicit)
        for divided in ("nothing", "states"):
            step = tiny_lm.released(adamaw(N, "data", "squares"))
            state = step.init(tiny_lm.parameters())
            call = jax.jit(step.data_parallel(explicit, divided))
            for batch in batches(size):  # placed nowhere by the caller
                state, _ = call(state, batch)
            same, _ = over(mesh, size, divided, False)
            found[f"explicit mesh, {divided}"] = worst(
                jax.device_put(state, NamedSharding(mesh, P())), jax.device_get(same)
            )
        for checked in (False, True):
            found[f"transformation, {checked}"] = worst(by_transform(mesh, size, checked), want)
            got = by_transform(mesh, size, checked, "row")
            found[f"transformation, {checked}, row"] = worst(got, of_rows)
    if not several:
        assert "each device's own gradient" in summed_already(mesh)
    return {"devices": devices, "found": found}
