"""Run by test_mapped_on_devices.py with eight devices, and names of attentions: gradients of layers
whose attention runs inside `jax.shard_map`, under plans for tags inside and outside, beside those
of the layers without a checkpoint.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem.errors import JaxmemWarning
from tests.shared import mapped

jax.config.update("jax_enable_x64", True)
warnings.simplefilter("ignore", JaxmemWarning)
NAMES = ("q", "probs", "ctx", "up")
CODEC = "grouped_symmetric(group=32,scale=float32)"
PLANS = {
    "keep": Assignment({"block": dict.fromkeys(NAMES, "keep")}),
    "recompute": Assignment({"block": dict.fromkeys(NAMES, "recompute")}),
    "offload": Assignment({"block": dict.fromkeys(NAMES, "offload")}),
    "compress": Assignment({"block": {"ctx": jaxmem.plans.Choice("compress", CODEC)}}),
}


def arrays(mesh):
    random = np.random.default_rng(0)
    made = lambda size: jnp.asarray(random.standard_normal(size) / 8)
    put = lambda size, spec: jax.device_put(made(size), NamedSharding(mesh, spec))
    return {k: put(size, P()) for k, size in mapped.SHAPES.items()}, put(mapped.X, mapped.ROWS)


def error(step, want, args) -> float:
    """The largest difference of an update from `want`, as a share of the largest update of its
    array.
    """
    got = jax.jit(step)(*args)[0]
    found = []
    for name, before in args[0].items():
        update = np.abs(np.subtract(want[name], before)).max()
        assert update > 0, name
        found.append(float(np.abs(np.subtract(got[name], want[name])).max() / update))
    return max(found)


def errors(kind, axes, check) -> dict[str, float]:
    mesh = Mesh(np.array(jax.devices()).reshape(mapped.SIZES), mapped.AXES, axis_types=(axes,) * 3)
    with jax.set_mesh(mesh):
        args = arrays(mesh)
        build = lambda **how: mapped.build_with(kind, mesh, check=check, **how)
        want = jax.jit(build(tag=mapped.untagged)(None))(*args)[0]
        found = {name: error(build()(plan), want, args) for name, plan in PLANS.items()}
        found["loop"] = error(build(looped=False)(PLANS["keep"]), want, args)
        own = build(tag=mapped.untagged, own=True)(None)
        planned = jaxmem.plan(jaxmem.auto(own), *args, actions=jaxmem.plans.LOSSLESS)
        found["auto"] = error(jaxmem.auto(own, planned), want, args)
        return found


def main(*names):
    found = {}
    for name in names:
        kind, axes, check = name.split(":")
        kind, axis = getattr(mapped, kind), getattr(AxisType, axes)
        found[name] = errors(kind, axis, check == "checked")
    return found
