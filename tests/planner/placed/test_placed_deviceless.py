"""Plans that place states for a GPU that is not there."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.shared import tiny_lm
from tests.shared.streamed import host_bytes

pytestmark = [
    pytest.mark.jax_defaults,
    pytest.mark.slow,
    pytest.mark.usefixtures("own_database"),
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jaxlib reads such arrays wrongly"),
]
LAYERS, WIDTH, VOCAB = 12, 512, 512
BOTH = ("actions", "states")
LINE = 0.02  # of a budget for a device that is not there: left for autotuning


def build(plan, microbatches=2):
    tx = jaxmem.adama(1e-3, accumulation_steps=microbatches)
    return tiny_lm.released(tx, plan=plan, dtype=jnp.bfloat16)


def state():
    make = functools.partial(tiny_lm.parameters, np.float32, layers=LAYERS, width=WIDTH)
    return jax.eval_shape(lambda: build(None).init(make(vocab=VOCAB)))


def nbytes(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def planned(share: float, target="h200", **arguments):
    batch = jax.ShapeDtypeStruct((32, 129), jnp.int32)
    budget = int(share * nbytes(state()))
    return jaxmem.plan(
        build, state(), batch, target=target, budget=budget, decide=BOTH, **arguments
    )


@pytest.mark.parametrize(("target", "share"), [("h200", 0.5), ("rtx4090", 0.8)])
def test_states_and_tensors_share_a_budget(target, share):
    plan = planned(share, target)
    assert plan.compiled_bytes <= (1 - LINE) * plan.budget_bytes
    assert plan.predicted_bytes == pytest.approx(plan.compiled_bytes, rel=0.1)
    assert plan.places.persist < LAYERS
    host = host_bytes(plan.place(state()))
    choices = [c for tags in plan.actions.values() for c in tags.values()]
    if all("offload" not in c.action.value for c in choices):
        assert plan.host_bytes == host > 0
    else:
        assert plan.host_bytes > host > 0
    assert plan.compiles <= 3
    # The curve: less time for more bytes, from states in host memory to states on the device.
    times = [point.seconds for point in plan.points]
    assert len(times) > 2
    assert times == sorted(times, reverse=True)


def test_more_of_either_memory_is_never_slower():
    some = [planned(share).predicted_seconds for share in (0.5, 0.65, 0.8, 1.5)]
    slower = [late - early for early, late in itertools.pairwise(some)]
    assert max(slower) <= 0.002 * some[0]
    host = [planned(0.8, host_budget=gib).predicted_seconds for gib in ("110MiB", "1GiB")]
    assert host[1] <= 1.002 * host[0]
