"""Makes a plan's timeline from the counts that were decided."""

import dataclasses

from jaxmem._model.states.places import HOST
from jaxmem._planner.placement.lanes import passes
from jaxmem._planner.placement.program import Answer, Question
from jaxmem._result.plan.timeline import Pass, PlacedLayers, Timeline


def timeline_of(question: Question, found: Answer, outside: float) -> Timeline:
    """The lanes of a step under an answer of the program.

    outside: seconds of the work outside the layers.
    """
    states = question.states
    groups = []
    for kind, count in found.counts.items():
        own = passes(question.ways[kind.way], kind.place, states, question.link, question.sharding)
        # The lanes of the program are those of a timeline, by name.
        three = [Pass(dataclasses.asdict(one)) for one in (own.forward, own.backward, own.last)]
        device, host = states.on_device(kind.place), states.on_host(kind.place)
        groups.append(PlacedLayers(count, kind.place, device, host, *three))
    layers = sum(n * question.seconds(kind) for kind, n in found.counts.items())
    hosted = found.outer == HOST
    return Timeline(
        microbatches=question.microbatches,
        groups=tuple(groups),
        alone_seconds=max(0.0, found.seconds - layers),  # a difference of sums, which is rounded
        outside_seconds=outside,
        outer_device_bytes=0 if hosted else states.outside,
        outer_host_bytes=states.outside if hosted else 0,
    )
