"""Makes timelines of given counts of layers, from a placement problem with invented prices."""

from jaxmem._core.actions import OFFLOAD
from jaxmem._model.states.places import HOST
from jaxmem._planner.outcome.placed import timeline_of
from jaxmem._planner.placement.layer import PLACES, LayerGroup, LayerPolicy, Link, States
from jaxmem._planner.placement.program import PlacementProblem, PlacementSolution
from jaxmem._result.plan.timeline import Timeline

MB = 1_000_000
OUTSIDE = 0.03  # seconds of the work outside the layers
# A policy on the device, and a policy that offloads.
WORKING = {False: 5 * MB, True: 30 * MB}
WAYS = (
    LayerPolicy({}, 10 * MB, 0, 2e-3, 4e-3, working=WORKING),
    LayerPolicy({"up": OFFLOAD}, 10 * MB, 20 * MB, 2e-3, 3e-3, working=WORKING),
)


def problem(layers: int, microbatches: int = 4) -> PlacementProblem:
    states = States(layers, 40 * MB, 80 * MB, 20 * MB, 60 * MB, 50 * MB)
    return PlacementProblem(states, WAYS, Link(25e9, 22e9), microbatches)


def timeline(each: int = 6, microbatches: int = 4, places=PLACES) -> Timeline:
    """Returns the timeline with `each` layers of every place. Resident layers offload."""
    asked = problem(each * len(places), microbatches)
    counts = {LayerGroup(place, int(place == "resident")): each for place in places}
    return timeline_of(asked, PlacementSolution.of(asked, counts, HOST), OUTSIDE)
