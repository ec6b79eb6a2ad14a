"""Run by test_typed_codecs.py: codecs of arrays that four CPUs share, whose types say how. A line
of JSON: what differs from the same on one device, or fails; and a plan of a step on such a mesh.

    python -m tests.shared.worker tests.programs.typed_codecs
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem import codecs
from tests.shared.compare import relative
from tests.shared.outlier_layers import loss_of

P = PartitionSpec
FLOATS = (
    codecs.OutlierSeparated(),
    codecs.GroupedAsymmetric(),
    codecs.ChannelwiseSymmetric(),
    codecs.NaivePerToken(),
)
# The last axis whole, divided between groups and within one, and rows of several tokens.
CASES = [
    *((c, (8, 4, 512), P("a", None, "b")) for c in (*FLOATS, codecs.BitMask())),
    *((c, (8, 4, 64), P(None, None, ("a", "b"))) for c in (*FLOATS, codecs.BitMask())),
    *((c, (8, 8, 32), P("a", None, "b")) for c in (*FLOATS, codecs.BitMask())),
    (codecs.OutlierSeparated(), (8, 8, 64), P("a", "b")),
    (codecs.OutlierSeparated(group=1024), (8, 16, 512), P("a", None, "b")),
    (codecs.GroupedSymmetric(group=1024), (8, 16, 512), P(None, "a", "b")),
]


def values(codec, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[..., 7] *= 50
    return jnp.asarray(x > 0 if isinstance(codec, codecs.BitMask) else x)


def wrong(mesh, codec, shape, spec) -> str | None:
    x = values(codec, shape)
    there = jax.jit(lambda x: codec.decode(codec.encode(x), x.shape, x.dtype))
    try:
        got = there(jax.device_put(x, NamedSharding(mesh, spec)))
    except Exception as error:
        return f"{codec} of {shape} on {spec}: {type(error).__name__}: {error}"
    return None if np.array_equal(got, there(x)) else f"{codec} of {shape} on {spec} differs"


def layer(x, p):
    """Tensor parallel: what lies between the products is divided along its last axis."""
    x = jaxmem.tag(x, "in", kind="residual")
    hidden = jaxmem.tag(jnp.tanh(x @ p["up"]), "hidden", kind="gelu")
    return x + jnp.einsum("rf,fd->rd", hidden, p["down"], out_sharding=P(None, None))


def build(plan):
    return jax.grad(loss_of(plan, layer))


def planned(mesh) -> dict:
    def made(seed, shape, spec):
        random = np.random.default_rng(seed).standard_normal(shape) / 16
        return jax.device_put(jnp.asarray(random, jnp.float32), NamedSharding(mesh, spec))

    params = {
        "up": made(1, (4, 64, 256), P(None, None, "b")),
        "down": made(2, (4, 256, 64), P(None, "b", None)),
    }
    x, want = made(3, (512, 64), P()), None
    errors = []
    for action in ("keep", "recompute", "compress"):
        codec = str(codecs.OutlierSeparated()) if action == "compress" else None
        choice = {"action": action} | ({"codec": codec} if codec else {})
        tags = {name: jaxmem.plans.Choice(**choice) for name in ("in", "hidden")}
        got = jax.jit(build(jaxmem.plans.Assignment({"block": tags})))(params, x)
        want = got if want is None else want
        errors.append(relative(got, want))
    plan = jaxmem.plan(build, params, x)
    return {"errors": errors, "before": [row.bytes_before for row in plan.rows]}


def main() -> dict:
    mesh = jax.make_mesh((2, 2), ("a", "b"))  # explicit, as JAX makes them
    with jax.set_mesh(mesh):
        found = [said for case in CASES if (said := wrong(mesh, *case))]
        return {"wrong": found, **planned(mesh)}
