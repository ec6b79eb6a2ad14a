"""Run by test_revised_on_mesh.py: a rectifier that was made before `jax.set_mesh`, whose step needs
the mesh to be traced, on four CPUs. A line of JSON: the budget, the bytes of the plan that the
planning thread makes, and how far the parameters after its step differ from those after the step of
the plan before.

    python -m tests.shared.worker tests.programs.rectified_on_mesh Explicit
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.runs import Rectifier
from tests.shared import outlier_layers
from tests.shared.compare import farthest
from tests.shared.outlier_layers import batch, parameters
from tests.shared.rectified import ASKED

P = PartitionSpec
LAYERS = 2


def builder(explicit: bool):
    divided = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint

    def block(x, p):
        hidden = divided(x @ p["up"], P("d"))  # a spec alone, which the mesh that is set reads
        up = jaxmem.tag(hidden, "up", kind="linear")
        return x + jnp.tanh(up) * up @ p["down"]

    return functools.partial(outlier_layers.build, block=block)


def main(kind: str) -> dict:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType[kind],))
    build = builder(kind == "Explicit")
    put = lambda tree, spec: jax.device_put(
        jax.tree.map(lambda a: a.astype(jnp.float32), tree), NamedSharding(mesh, spec)
    )

    def first():  # made anew, since a step takes its memory over
        params = parameters((), layers=LAYERS)
        return put({"up": params["up"], "down": params["down"]}, P())

    x = put(batch(64), P("d"))
    with jax.set_mesh(mesh):
        kept = jaxmem.plan(build, first(), x)
        plan = jaxmem.plan(build, first(), x, budget=int(0.8 * kept.baseline_bytes), **ASKED)
    rectifier = Rectifier(plan, build, first(), x, **ASKED)
    with jax.set_mesh(mesh):
        planning = rectifier._again.begin(plan.budget_bytes, {"block": {"up": 4}})
        again, step = planning.result()
        states = [f(first(), x)[0] for f in (plan.step, step)]
    rectifier._again.close()
    found = {"budget": plan.budget_bytes, "bytes": again.compiled_bytes}
    return found | {"far": farthest(*states)}
