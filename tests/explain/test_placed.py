"""A plan that places states is explained with its states where it says, here and for a GPU."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.actions import KEEP, RECOMPUTE
from jaxmem._core.assignment import Assignment
from jaxmem._cost.blocks.classes import plan_fingerprint
from jaxmem._cost.profile.profile import block_classes
from jaxmem._model.states.places import HOST, Places
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._planner.placement.steps import PlacedSteps
from jaxmem._target.compile.backend import backend_for
from jaxmem._trace.step import trace
from jaxmem.errors import PlanFileError, StepError, TargetError
from jaxmem.plans import Target
from tests.explain.test_explain import add_up
from tests.shared import plans, tiny_lm

pytestmark = [pytest.mark.jax_defaults, pytest.mark.usefixtures("own_cache")]
LAYERS, WIDTH, PERSIST = 6, 64, 2
PLACES = Places(LAYERS, PERSIST, outer_moments=HOST)


def build(plan):
    return tiny_lm.released(jaxmem.adama(1e-2), plan=plan)


def shapes():
    params = tiny_lm.parameters(np.float32, LAYERS, WIDTH, vocab=32)
    return jax.eval_shape(build(None).init, params)


BATCH = jax.ShapeDtypeStruct((4, 17), jnp.int32)


def plan(places=PLACES, **changes):
    """The layers that stream are recomputed, the others keep what is tagged."""
    with todays_checkpoint():
        found = trace(build, Assignment.nothing(), (shapes(), BATCH))[1]
    both = lambda choice: {"in": choice, "up": choice}
    actions = {"block[0:2]": both(KEEP), "block[2:6]": both(RECOMPUTE)}
    made = {
        "target": "local",
        "actions": actions,
        "fingerprint": plan_fingerprint(block_classes(found.jaxpr)),
    }
    return plans.plan(places=places, **(made | changes))


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def names(parts) -> str:
    return " ".join(item.name for part in parts for item in part.items)


def test_states_in_host_memory_are_told_by_name():
    found = jaxmem.explain(build, shapes(), BATCH, plan=plan(), beside=True)
    add_up(found)
    params, optimizer = shapes()
    mu, nu = optimizer.mu, optimizer.nu
    streamed = nbytes([params["blocks"], mu["blocks"], nu["blocks"]]) * 4 // 6
    outer = [{k: a for k, a in m.items() if k != "blocks"} for m in (mu, nu)]
    assert found.host_bytes == streamed + nbytes(outer)
    assert {part.kind for part in found.host_parts} == {"arguments"}
    hosted, here = names(found.host_parts), names(found.parts)
    assert f"state[0]['blocks'].parts[1]['up'] f32[4,{WIDTH},{2 * WIDTH}]" in hosted
    assert f"state[0]['blocks'].parts[0]['up'] f32[2,{WIDTH},{2 * WIDTH}]" in here
    assert "parts[1]" not in here
    assert "state[1].mu['embedding']" in hosted
    # What a plan of it compiles to.
    with backend_for(Target.parse("local")) as backend:
        steps = PlacedSteps(build, (shapes(), BATCH), backend)
        placed = steps.compile_fully(Assignment(plan().actions), PLACES).compiled
    assert (found.total_bytes, found.host_bytes) == (placed.total_bytes, placed.host_bytes)
    assert max(found.live.totals) <= found.live.total_bytes == found.total_bytes
    # Without a plan all states are on the device.
    add_up(found.beside)
    assert found.beside.host_bytes == 0
    assert found.beside.total_bytes > found.total_bytes


def test_a_state_may_lie_anywhere_before():
    state = build(None).init(tiny_lm.parameters(np.float32, LAYERS, WIDTH, vocab=32))
    split = build(None).split(state, persist=4)
    one = jaxmem.explain(build, split, BATCH, plan=plan())
    assert one == jaxmem.explain(build, shapes(), BATCH, plan=plan())


def test_the_plan_of_another_model_is_refused():
    with pytest.raises(PlanFileError, match="`places.layers` is 7, and the model has 6; plan"):
        jaxmem.explain(build, shapes(), BATCH, plan=plan(Places(7, 2)))
    with pytest.raises(PlanFileError, match="its `fingerprint` is abc"):
        jaxmem.explain(build, shapes(), BATCH, plan=plan(fingerprint="abc"))
    with pytest.raises(StepError, match="expected what jaxmem.released_step returns"):
        jaxmem.explain(lambda plan: jax.jit(build(plan)), shapes(), BATCH, plan=plan())


@pytest.mark.slow
def test_for_a_gpu_what_streams_is_named():
    def explained():
        return jaxmem.explain(build, shapes(), BATCH, plan=plan(), target="h200")

    if jax.__version_info__ < (0, 11, 1):
        with pytest.raises(TargetError, match="host memory"):
            explained()
        return
    found = explained()
    add_up(found)
    assert "state[0]['blocks'].parts[1]['up'] f32[4," in names(found.host_parts)
    layers = nbytes(shapes()[0]["blocks"]) * 4 // 6
    moved = collections.Counter()
    for one in found.transfers:
        if one.in_loop:
            moved[one.name, one.to_host] += one.bytes
    # Parameters are fetched in the forward and in the backward, moments in the backward alone.
    tree, mu = "state[0]['blocks']", "state[1].mu"
    assert (moved[tree, False], moved[tree, True]) == (2 * layers, layers)
    assert (moved[mu, False], moved[mu, True]) == (layers, layers)
