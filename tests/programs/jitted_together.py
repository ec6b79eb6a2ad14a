"""A step of `jaxmem.jit` in several processes:
python -m tests.shared.worker tests.programs.jitted_together NUMBER COUNT PORT CACHE OTHER.

Each process prints, as JSON, what it got of three functions of one step: with empty caches, with a
plan stored by process 0 alone, and with a plan stored in the other processes alone. Then come steps
without layers.
"""

import functools
import hashlib
import os

import jax

import jaxmem
from jaxmem._planner import recall
from jaxmem._planner.search.history import History
from tests.programs.planned_together import arguments
from tests.shared import meshes, models
from tests.shared.mapped import stepping
from tests.shared.programs import nbytes


def counted(owner, name: str, calls: list):
    """Replaces a function by one that also counts its calls."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def counting(*args, **options):
        calls.append(name)
        return function(*args, **options)

    setattr(owner, name, counting)


step = stepping(models.scanned(None, models.narrow))


def without_layers(p, x):
    loss = lambda p: (p["a"][0] ** 2).sum() * (x * x).mean()
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(loss)(p))


def called(mesh, budget, calls: list) -> dict:
    """What the first two calls of a new function find."""
    calls.clear()
    made = jaxmem.jit(step, budget, actions=jaxmem.plans.LOSSLESS, donate_argnums=0)
    p, x = arguments(mesh)
    losses = []
    for _ in range(2):
        p, loss = made(p, x)
        losses.append(float(loss))
    return {
        "plan": made.plan.to_json(),
        "program": hashlib.sha256(made.plan.step.as_text().encode()).hexdigest(),
        "losses": losses,
        "calls": list(calls),
    }


def outcome(function, *args) -> str:
    """The type of the error that a call raises; empty if it raises none."""
    try:
        jax.block_until_ready(function(*args))
    except jaxmem.errors.JaxmemError as error:
        return type(error).__name__
    return ""


def main(number: str, count: str, port: str, *caches: str) -> dict:
    meshes.join(int(number), int(count), int(port))
    calls = []
    make = recall.make_plan
    recall.make_plan = functools.wraps(make)(lambda *args, **options: make(*args, **options))
    recall.make_plan.__wrapped__ = make.__wrapped__
    counted(recall.make_plan, "__wrapped__", calls)
    counted(History, "recall_plan", calls)
    mesh = meshes.line()
    os.environ["XDG_CACHE_HOME"] = caches[0]  # jaxmem's database lies there
    whole = jax.jit(step, donate_argnums=0).lower(*arguments(mesh)).compile()
    budget = int(0.9 * nbytes(whole))
    found = {
        "budget": budget,
        "fresh": called(mesh, budget, calls),
        "stored": called(mesh, budget, calls),
    }
    os.environ["XDG_CACHE_HOME"] = caches[1]
    found["elsewhere"] = called(mesh, budget, calls)
    p, want = arguments(mesh), []
    for _ in range(2):
        new, loss = jax.jit(step)(*p)
        p, want = (new, p[1]), [*want, float(loss)]
    unplanned = lambda budget: outcome(jaxmem.jit(without_layers, budget), *arguments(mesh))
    return found | {
        "want": want,
        "unplanned": unplanned("1GiB"),
        "too large in one": unplanned("1GiB" if number == "0" else 10),
        "too large in the first": unplanned("1GiB" if number != "0" else 10),
    }
