"""Run by test_stack_sharded.py with four devices, and names of plans: the stack's gradients over a
mesh beside those of a scan, unsharded.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._core.actions import Choice
from jaxmem._core.assignment import Assignment
from tests.shared import meshes, models
from tests.shared.compare import relative

jax.config.update("jax_enable_x64", True)
LAYERS = 4
mesh = meshes.line()
weights, x = models.parameters(LAYERS, 16, jnp.float64), models.batch(8, 8, 16, jnp.float64)
weights = {name: weights[name] for name in ("up", "down")}
TAGS = ("up", "mask")
numbers = jnp.arange(LAYERS, dtype=jnp.float32)
PLANS = {
    "none": None,
    "recompute": models.draft("recompute", TAGS),
    "compress": Assignment({"block": {"act": Choice("compress", models.CODEC["gelu"])}}),
    "groups": Assignment(
        {
            "block[0:1]": models.actions("recompute", TAGS),
            "block[1:4]": models.actions("keep", TAGS),
        }
    ),
}


def block(p, x, shift):
    return models.narrow(x, *p) + shift


def stacked(plan):
    def loss(weights, shift, x):
        y = jaxmem.stack(block, (weights, numbers), x, shift, plan=plan)
        return (y * y).mean()

    return loss


def folded(plan):
    """The same with each layer's gradient added to moments, which start from zero."""

    def gradient(weights, shift, x):
        def loss(moments, shift, x):
            fold = lambda m, g: jax.tree.map(jnp.add, m, g[0])
            into = {"moments": moments, "fold": fold}
            y = jaxmem.stack(block, (weights, numbers), x, shift, plan=plan, **into)
            return (y * y).mean()

        moments = jax.tree.map(lambda w: w * 0, weights)
        return jax.grad(loss, (0, 1, 2))(moments, shift, x)

    return gradient


def accumulated(gradient):
    def total(weights, shift, x):
        parts = x.reshape(4, 2, *x.shape[1:]).swapaxes(0, 1)  # each microbatch over all devices
        one = lambda sums, part: (
            jax.tree.map(jnp.add, sums, gradient(weights, shift, part)[:2]),
            None,
        )
        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, (weights, shift)), parts)[0]

    return total


def per_device(loss, gradient):
    """Under shard_map: the mean over devices, differentiated outside it; and moments that stay with
    their device.
    """
    mean = lambda w, s, x: jax.lax.pmean(loss(w, s, x), "data")
    outside = jax.grad(
        jax.shard_map(mean, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()), (0, 1, 2)
    )
    inside = lambda w, s, x: jax.lax.pmean(gradient(w, s, x)[:2], "data")
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P())}
    return outside, jax.shard_map(inside, mesh=mesh, check_vma=False, **specs)


def main(*names):
    shift = jnp.linspace(0.0, 0.3, 16)
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    whole = (place(weights, P()), place(shift, P()), place(x, P("data")))
    divided = (
        jax.tree.map(lambda a: place(a, P(None, None, "data")), weights),
        *whole[1:],
    )  # as FSDP would
    found = {}
    for name in names:
        plan = PLANS[name]
        gradient = jax.grad(stacked(plan), (0, 1, 2))
        want = jax.jit(gradient)(weights, shift, x)
        found[f"{name} replicated"] = relative(jax.jit(gradient)(*whole), want)
        found[f"{name} divided"] = relative(jax.jit(gradient)(*divided), want)
        found[f"{name} folded, divided"] = relative(jax.jit(folded(plan))(*divided), want)
        twice = jax.jit(accumulated(gradient))
        found[f"{name} accumulated"] = relative(
            twice(*divided), jax.tree.map(lambda a: 2 * a, want[:2])
        )
        outside, inside = per_device(stacked(plan), folded(plan))
        found[f"{name} shard_map"] = relative(jax.jit(outside)(*whole), want)
        found[f"{name} shard_map, folded"] = relative(jax.jit(inside)(*whole), want[:2])
    return found
