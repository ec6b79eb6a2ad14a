"""Makes the Profile of a traced step: blocks, tags, what the backward needs, bytes, and times on
the target.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxmem._core.groups import is_auto
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.warn import warn
from jaxmem._cost.blocks.classes import Class, blocks_of, plan_fingerprint
from jaxmem._cost.blocks.opened import hidden_tags
from jaxmem._cost.profile.doubt import SEEN, WORTH, with_doubts
from jaxmem._cost.profile.jobs import Jobs
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.price import Unpriced, priced_class, unpriced
from jaxmem._cost.profile.times import job_times
from jaxmem._cost.profile.whole import whole


def profile(
    jaxpr,
    backend,
    allowed: Allowed,
    *,
    axes: Mapping[str, int] = MappingProxyType({}),
    database=None,
) -> Profile:
    """Returns what is learned of a step from its jaxpr, and from timing its pieces.

    jaxpr: the step's, traced with every tag recomputed.
    backend: a `Pricing`, which knows the target and tells times.
    allowed: the actions and codecs that are given prices.
    axes: size by name of the mesh axes that divide the step's batch.
    database: where times are remembered; None means the user's own.

    Raises StepError where no block is found, TagError for a name whose places in a block ask for
    different codecs.
    """
    target = backend.target
    found = blocks_of(whole(jaxpr))
    actions = allowed.actions
    everywhere = target.traits.offloads_everywhere
    looped = [a for a in actions if everywhere or not a.offloads]
    allowed = dataclasses.replace(allowed, looped=looped)
    jobs = Jobs(target.local, target.traits.tiled)
    # First draft all classes, whose prices are jobs; then time all jobs at once; then price.
    unrolled = _unrolled(found.classes)
    offloads = not everywhere and any(a.offloads for a in actions)
    nested = _nested(found.classes)
    if offloads:
        _warn_of_offload(unrolled, nested)
    drafts = []
    for number, (graph, instances) in enumerate(found.classes):
        left_out = offloads and instances[0].label in (*unrolled, *nested)
        here = allowed.without_offload() if left_out else allowed
        drafts.append(unpriced(graph, number, here, jobs, axes))
    if len(looped) < len(actions):
        left_out = {*unrolled, *nested}
        _warn_of_loops(d for d in drafts if d.graph.instance.label not in left_out)
    hidden = hidden_tags((d.graph.instance.label, d.opened, d.shards) for d in drafts)
    times = job_times(jobs.jobs, backend, database)
    price = jobs.prices(times.seconds)
    blocks = [
        priced_class(draft, instances, price)
        for draft, (_, instances) in zip(drafts, found.classes)
    ]
    step_seconds = sum(b.runs * (b.forward_seconds + b.backward_seconds) for b in blocks)
    share = WORTH if allowed.careful else SEEN
    blocks = with_doubts(blocks, times.uncertainty, step_seconds, share)
    return Profile(
        fingerprint=plan_fingerprint(blocks),
        blocks=tuple(blocks),
        target=target.name,
        link_bytes_per_second=target.link,
        step_seconds=step_seconds,
        time_source=times.source,
        idle_tags=_idle_tags(blocks, found.tag_names - hidden),
        idle_blocks=found.idle,
        unrolled=unrolled,
        disturbed=times.disturbed,
        uncertainty=times.uncertainty,
    )


def block_classes(jaxpr, axes: Mapping[str, int] = MappingProxyType({})) -> list[BlockClass]:
    """Returns the blocks and tags of a traced step, without options and with every price 0. Bytes
    are those of one of the devices along `axes`, the mesh axes that divide the step's batch.
    """
    classes, jobs = blocks_of(jaxpr).classes, Jobs(False)
    drafts = [
        unpriced(graph, number, Allowed(), jobs, axes) for number, (graph, _) in enumerate(classes)
    ]
    free = jobs.prices([0.0] * len(jobs.keys))
    return [priced_class(draft, instances, free) for draft, (_, instances) in zip(drafts, classes)]


def _unrolled(classes: Sequence[Class]) -> tuple[str, ...]:
    """Returns labels of blocks that a Python loop repeats."""
    repeats: dict[str, list[int]] = {}
    for _, instances in classes:
        repeats.setdefault(instances[0].label, []).extend(i.layers for i in instances)
    # Several instances under one label, each of one layer: no loop of the program repeats them.
    found = (label for label, layers in repeats.items() if len(layers) > 1 and max(layers) == 1)
    return tuple(sorted(found))


def _nested(classes: Sequence[Class]) -> tuple[str, ...]:
    """Returns labels of blocks whose saved tensors are stacked by a loop in a loop, as those of
    layers are whose microbatches are all differentiated together.
    """
    return tuple(
        sorted({i.label for _, instances in classes for i in instances if i.repeats.loops > 1})
    )


def _warn_of_offload(unrolled: Sequence[str], nested: Sequence[str]) -> None:
    """Warns of blocks for which offload is left out."""
    named = lambda labels: ", ".join(map(repr, labels))
    if unrolled:
        warn(
            f"jaxmem: offload is left out for block {named(unrolled)}: its layers are unrolled in"
            " Python, and XLA:GPU would keep what they offload on the device; loop over the layers"
            " with jax.lax.scan"
        )
    if nested:
        warn(
            f"jaxmem: offload is left out for block {named(nested)}: a loop in a loop holds what it"
            " saves, and XLA:GPU does not compile that in host memory; take the gradient inside the"
            " outer loop, where it is one over microbatches"
        )


def _warn_of_loops(drafts: Iterable[Unpriced]) -> None:
    """Warns of tags inside loops of blocks, for which offload is left out."""
    names = {
        o.tag.params["name"] for d in drafts for o in d.opened.operations if o.tag and o.looped
    }
    if names:
        warn(
            f"jaxmem: offload is left out for the tags {', '.join(map(repr, sorted(names)))}: they"
            " stand inside a loop of their block, and XLA:GPU does not compile what such a loop"
            " offloads; tag what the loop returns to have it offloaded"
        )


def _idle_tags(blocks: Sequence[BlockClass], names: set[str]) -> tuple[str, ...]:
    """Returns names of tags that no block's backward reads, with a warning: but for tags that
    `jaxmem.auto` chose, which the user cannot move.
    """
    idle = tuple(sorted(names - {t.name for b in blocks for t in b.tags}))
    if idle and not all(is_auto(b.name) for b in blocks):
        warn(
            f"jaxmem: no block's backward reads the tags {', '.join(map(repr, idle))}: they stand"
            " outside every block, or only linear operations follow them; what a plan says of them"
            " changes nothing"
        )
    return idle
