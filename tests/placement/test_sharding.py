"""What crosses between devices, against sums by hand."""

import pytest

from jaxmem._model.states.places import DEVICE
from jaxmem._planner.placement.layer import (
    GATHERED_BESIDE,
    ONE_DEVICE,
    RESIDENT,
    STREAMED,
    LayerGroup,
    LayerPolicy,
    Link,
    Sharding,
    States,
    lanes_of,
)
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution

pytestmark = pytest.mark.core
MB = 1_000_000
# Two microbatches through 10 layers, of 40 MB of parameters each that cross as 20 MB.
WHOLE = States(10, 40 * MB, 80 * MB, 20 * MB, 200 * MB, 0, 20 * MB, 50 * MB, 100 * MB)
POLICY = LayerPolicy({}, 0, 0, 1.0, 2.0, working={False: 0, True: 0})
RATE = 1000 * MB
RING = 3 / 4 / RATE  # seconds a byte, among four


def seconds(sharding, place=RESIDENT):
    problem = PlacementProblem(WHOLE, (POLICY,), Link(1e15, 1e15), 2, sharding=sharding)
    return PlacementSolution.of(problem, {LayerGroup(place, 0): 10}, DEVICE).seconds


WORK = 2 * 10 * 3.0


def test_on_one_device_nothing_crosses():
    assert seconds(ONE_DEVICE) == pytest.approx(WORK)


@pytest.mark.parametrize(
    ("divided", "crossing"),
    [
        # All moments are reduced once: as if scattered and gathered.
        ("nothing", 2 * (10 * 80 + 200)),
        # Gradients are scattered in each microbatch, parameters gathered once, as they are stored.
        ("moments", 2 * (10 * 40 + 100) + 10 * 40 + 100),
        ("states", 2 * (10 * 20 + 50) + 10 * 20 + 50),
    ],
)
def test_what_crosses_beside_no_work_is_added_to_it(divided, crossing):
    found = seconds(Sharding(divided, 4, RATE))
    assert found == pytest.approx(WORK + crossing * MB * RING, rel=1e-6)


def test_other_optimizers_reduce_each_gradient_as_it_is_stored():
    found = seconds(Sharding("nothing", 4, RATE, accumulates=False))
    assert found == pytest.approx(WORK + 2 * 2 * (10 * 40 + 100) * MB * RING, rel=1e-6)


def test_where_nothing_runs_beside_work_all_that_crosses_is_waited_for():
    link = Link(1e9, 5e8, beside=False)
    policy = LayerPolicy({}, 0, 10 * MB, 1.0, 2.0)
    own = lanes_of(policy, STREAMED, WHOLE, link)
    # Parameters are fetched and 10 MB offloaded; then both states and the 10 MB are fetched, and
    # both states written back.
    assert own.forward.seconds == pytest.approx(1.0 + 0.040 + 0.020)
    assert own.last.seconds == pytest.approx(2.0 + 0.120 + 0.010 + 0.240)
    assert own.last.exposed == pytest.approx(own.last.seconds - 2.0)


def test_what_a_layer_gathers_is_hidden_by_its_work_but_for_the_first_weights():
    slow = Sharding("layers", 4, RATE / 200)  # 3 s to gather a layer
    gathered = 20 * MB * RING * 200
    found = lanes_of(POLICY, STREAMED, WHOLE, Link(1e15, 1e15), slow)
    first = (1 - GATHERED_BESIDE) * gathered
    assert found.forward.seconds == pytest.approx(max(1.0, GATHERED_BESIDE * gathered) + first)
    scattered = gathered
    assert found.backward.lanes["waited"] == pytest.approx(first + scattered)
    fast = Sharding("layers", 4, RATE * 200)
    assert (
        lanes_of(POLICY, STREAMED, WHOLE, Link(1e15, 1e15), fast).forward.lanes["collectives"] < 1.0
    )
    assert found.forward.exposed > 0
