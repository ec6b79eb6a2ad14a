"""Plans that several processes make of one step:
python -m tests.shared.worker tests.programs.planned_together NUMBER COUNT PORT CACHE.

Each process prints, as JSON, the plan that it got and what it compiled to, how often it searched,
the loss of a step over all devices, and what became of plans that cannot be made.
"""

import functools
import hashlib
import os

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._planner import plan as planner
from jaxmem._target.devices.target import Target
from tests.shared import meshes, models
from tests.shared.meshes import placed
from tests.shared.programs import nbytes


def arguments(mesh):
    """Parameters that all devices hold, and a batch that is divided over them."""
    parameters = models.parameters(3, 32, jnp.float32)
    parameters = jax.tree.map(lambda a: placed(a, mesh), parameters)
    return parameters, placed(models.batch(8, 64, 32, jnp.float32), mesh, P("data"))


def refused(build, *args, **asked) -> tuple[str, int | None]:
    """The type of the error, and its least bytes."""
    try:
        jaxmem.plan(build, *args, **asked)
    except jaxmem.errors.JaxmemError as error:
        return type(error).__name__, getattr(error, "least_bytes", None)
    return "", None


def main(number: str, count: str, port: str, cache: str) -> dict:
    meshes.join(int(number), int(count), int(port))
    os.environ["XDG_CACHE_HOME"] = cache  # jaxmem's database lies there
    searches = []
    find_plan = planner.find_plan
    planner.find_plan = lambda *args: searches.append(1) or find_plan(*args)
    mesh = meshes.line()
    build = models.build_with(functools.partial(models.scanned, block=models.narrow))
    wide = models.build_with(models.scanned)
    args = arguments(mesh)
    infeasible = refused(build, *args, budget=100_000)
    budget = int(1.1 * (infeasible[1] or 0))
    plan = jaxmem.plan(build, *args, budget=budget, measure=0.1)
    otherwise, _ = refused(wide if number != "0" else build, *args)
    _, want = build(None)(*arguments(mesh))
    text = plan.step.as_text()
    _, loss = plan.step(*args)
    return {
        "plan": plan.to_json(),
        "program": hashlib.sha256(text.encode()).hexdigest(),
        "bytes": nbytes(plan.step),
        "searches": len(searches),
        "loss": float(loss),
        "want": float(want),
        "infeasible": infeasible,
        "otherwise": otherwise,
        "measured": plan.notes,
        "devices": Target.parse("local").devices,
    }
