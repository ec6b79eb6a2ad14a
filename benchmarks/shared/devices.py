"""Steps compiled for devices that are absent, without the planner; steps of a BERT over several
absent H200s, under AdamA and under accumulation in place, with undivided states, divided moments or
divided states; and a config's step for `jaxmem.plan` over several devices. Layers of the BERT keep
nothing in both ways, so that the two differ in the gradient alone.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from experiments.config.text import Config
from experiments.models import registry as models
from experiments.models.loops import scanned
from experiments.steps.accumulate import released_step, summed_in_place
from experiments.steps.step import abstract, step_over
from jaxmem._core.assignment import Assignment
from jaxmem._model.states.shards import assembled, gathered, part_of, refilled, scattered, shards
from jaxmem._model.states.store import fetch, put
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._trace.export import export_flat
from tests.shared import meshes

PLAN = Assignment({"block": {}})
AXIS = "data"  # of `meshes.abstract`


@functools.cache
def compiler(target: str) -> Compiler:
    """Compiles for a target without hardware, in a process that ends with this process."""
    return Compiler(target, workers=1)


def compiled(target: str, traced, capability: int | None = None, options=None) -> Compiled:
    """A traced step, compiled for a target without hardware. `capability` is the GPU's, for the
    kernels in the step.
    """
    found = compiler(target)
    exported, donated = export_flat(traced, found.target.platform, capability)
    return found.submit(exported, donated=donated, options=options).result()


def parameters(config: Config):
    """The shapes of a config's parameters."""
    return jax.eval_shape(functools.partial(models.create, config), jax.random.key(0))


def count(config: Config) -> int:
    return sum(math.prod(a.shape) for a in jax.tree.leaves(parameters(config)))


def adama(config: Config, devices: int, divided: str, dtype=None):
    """(step, state's shapes, its specs): released, over so many devices."""
    step = released_step(config, PLAN, AXIS, dtype)
    params, moments = jax.eval_shape(step.init, parameters(config))
    specs = step.specs(params, devices, divided)
    return step.data_parallel(meshes.abstract(devices), divided), (params, moments), specs


def accumulation(config: Config, devices: int, divided: str, dtype=None, gradients: str = "whole"):
    """The same, with Adam on gradients that are added up in place: each device's "whole", or its
    part ("divided").

    `divided` as for `data_parallel`. Divided gradients are reduce-scattered a layer and microbatch
    at a time (ZeRO-2).
    """
    tx, n, params = optax.scale_by_adam(), config.train.microbatches, parameters(config)
    state = params, jax.eval_shape(tx.init, params)
    parts = {k: shards(v, devices, AXIS, first=int(k == "blocks")) for k, v in params.items()}
    everywhere = jax.tree.map(lambda _: P(), params)
    of_moments = everywhere if divided == "nothing" else parts
    scalar: Any = P()
    specs = (
        parts if divided == "states" else everywhere,
        optax.ScaleByAdamState(scalar, of_moments, of_moments),
    )

    def whole_of(a, like):
        """An array that every device has, or a divided one that is gathered."""
        cast = a if dtype is None else a.astype(dtype)
        return a if a.shape == like.shape else gathered(cast, like, AXIS)

    def whole_layers(blocks):
        leaves, structure = jax.tree.flatten(blocks)
        like = jax.tree.leaves(params["blocks"])
        return jax.tree.unflatten(structure, assembled(leaves, like, AXIS, dtype))

    def add(total, gradient):
        gradient = scattered(gradient, total, AXIS)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32) / n, total, gradient)

    def step(state, batch, key):
        held, moments = state
        own = _apart(held, whole_layers, lambda k, v: jax.tree.map(whole_of, v, params[k]))
        like = own if gradients == "whole" else moments.mu
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), like)
        total, values = summed_in_place(config, own, batch, key, add, zero, PLAN)
        if divided == "nothing":
            total = _reduced(total)
        elif gradients == "whole":
            total = scattered(total, moments.mu, AXIS)
        made: Any = tx.update(total, moments)
        updates, moments = made

        mine = jax.tree.map(lambda p, m: part_of(p, m, AXIS), held, moments.mu)
        new = jax.tree.map(lambda p, u: p - 1e-4 * u, mine, updates)
        refill = lambda blocks: refilled(held["blocks"], blocks, AXIS)
        gather = lambda k, v: jax.tree.map(lambda a, p: gathered(a, p, AXIS), v, held[k])
        return (_apart(new, refill, gather), moments), jax.lax.pmean(values.mean(), AXIS)

    mapped = jax.shard_map(
        step,
        mesh=meshes.abstract(devices),
        in_specs=(specs, P(AXIS), P()),
        out_specs=(specs, P()),
        check_vma=False,
    )
    return mapped, state, specs


def _apart(tree, of_layers: Callable, of_other: Callable):
    """Parameters, the layers' by `of_layers(stacks)`, the others' by `of_other(name, them)`."""
    return {k: of_layers(v) if k == "blocks" else of_other(k, v) for k, v in tree.items()}


def _reduced(total):
    """The devices' mean, the layers' one after the other: XLA's all-reduce of whole stacks is not
    in place.
    """
    mean = lambda a: jax.lax.pmean(a, AXIS)
    one = lambda stacked, i: (put(stacked, jax.tree.map(mean, fetch(stacked, i)), i), None)
    layers = jnp.arange(jax.tree.leaves(total["blocks"])[0].shape[0])
    over = lambda blocks: jax.lax.scan(one, blocks, layers)[0]
    return _apart(total, over, lambda _, v: jax.tree.map(mean, v))


def placed(devices: int, specs, tree):
    """Shapes of a tree's arrays on a mesh. `specs` is a prefix of the tree."""
    mesh = meshes.abstract(devices)
    at = lambda spec, part: jax.tree.map(lambda a: meshes.shape(a, mesh, spec), part)
    return jax.tree.map(at, specs, tree)


def compiled_on(config: Config, devices: int, made) -> Compiled:
    """`made`: what `adama` or `accumulation` returns."""
    step, state, specs = made
    arguments = state, models.batch_shape(config), jax.random.key_data(jax.random.key(0))
    keyed = lambda state, batch, key: step(state, batch, jax.random.wrap_key_data(key))
    traced = jax.jit(keyed, donate_argnums=0).trace(
        *placed(devices, (specs, P(AXIS), P()), arguments)
    )
    return compiled(f"h200:{devices}", traced)


def fsdp(config: Config, devices: int) -> tuple[Callable, tuple]:
    """What `jaxmem.plan` takes: `build` of a config's step, and the shapes of its arguments, all
    divided over so many devices.
    """
    by_batch = NamedSharding(meshes.abstract(devices), P(AXIS))
    state, batch = abstract(config)
    # The stacks of layers are divided along the axis after the layers.
    specs = jax.tree.map(lambda a: P(None, AXIS) if a.ndim > 1 else P(), state)

    def build(plan):
        scan = scanned(jaxmem.remat_policy(plan))

        def loop(layer, parameters, x, *others):
            x = jax.lax.with_sharding_constraint(x, by_batch)
            return scan(layer, parameters, x, *others)

        return step_over(config, loop)

    return build, placed(devices, (specs, P(AXIS)), (state, batch))
