"""Makes the Profile of a traced step: blocks, tags, the values that the backward needs, bytes, and
times on the target.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxmem._core.groups import is_auto
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._core.warn import warn
from jaxmem._cost.blocks.classes import classes_of, plan_fingerprint
from jaxmem._cost.blocks.find import find_blocks
from jaxmem._cost.blocks.opened_block import Opened, hidden_tags, open_block
from jaxmem._cost.blocks.segments import BlockGraph
from jaxmem._cost.profile.doubt import MIN_GAIN_DEFAULT, MIN_GAIN_REQUESTED, with_doubts
from jaxmem._cost.profile.jobs import Jobs
from jaxmem._cost.profile.options import Allowed
from jaxmem._cost.profile.price import block_class, with_backwards, with_prices
from jaxmem._cost.profile.times import job_times
from jaxmem._cost.profile.unsharded import without_shardings
from jaxmem._target.devices.platforms import Platform


def profile(
    jaxpr,
    backend,
    allowed: Allowed,
    *,
    axes: Mapping[str, int] = MappingProxyType({}),
    database=None,
) -> Profile:
    """Returns the facts of a step from its jaxpr, and from timing its pieces.

    jaxpr: the jaxpr of the step, traced with every tag recomputed.
    backend: a `Pricing`, which knows the target and returns times.
    allowed: the actions and codecs that are given prices.
    axes: size by name of the mesh axes that divide the step's batch.
    database: where times are remembered; None means the user's own.

    Raises StepError where no block is found, TagError for a name whose occurrences in a block
    ask for different codecs.
    """
    target = backend.target
    found = find_blocks(without_shardings(jaxpr).jaxpr)
    classes = classes_of(found)
    traits = target.traits
    jobs = Jobs(target.local, traits.tiled)
    # Blocks whose saved tensors are stacked by a loop in a loop, as of layers if all microbatches
    # are differentiated together.
    in_loops = {i.label for graph in classes for i in graph.instances if i.loops > 1}
    unrolled, nested = _unrolled(classes), () if traits.offloads_nested else tuple(sorted(in_loops))
    offloads = any(a.offloads for a in allowed.actions)
    on_device = () if traits.offloads_unrolled else unrolled
    no_offload = {*on_device, *nested} if offloads else set()
    # First build all classes, whose prices are jobs; then time all jobs at once; then price.
    graphs = [_opened(graph, jobs, axes) for graph in classes]
    unpriced = [
        block_class(g, k, _allowed(allowed, g, no_offload, traits), jobs)
        for k, g in enumerate(graphs)
    ]
    if offloads:
        _warn_of_offload(on_device, nested)
        _warn_of_loops(
            g for g in graphs if g.label not in no_offload and not _offloads_in_loops(g, traits)
        )
    hidden = hidden_tags(graphs)
    times = job_times([*jobs.by_key.values()], backend, database)
    price = jobs.prices(times.seconds)
    blocks = [with_backwards(with_prices(block, price.__getitem__)) for block in unpriced]
    step_seconds = sum(b.runs * (b.forward_seconds + b.backward_seconds) for b in blocks)
    share = MIN_GAIN_DEFAULT if allowed.codecs_by_default else MIN_GAIN_REQUESTED
    blocks = with_doubts(blocks, times.uncertainty, step_seconds, share)
    return Profile(
        fingerprint=plan_fingerprint(blocks),
        blocks=tuple(blocks),
        target=target.name,
        link_bytes_per_second=target.link,
        step_seconds=step_seconds,
        time_source=times.source,
        idle_tags=_idle_tags(blocks, found.tag_names - hidden, found.saved_names),
        idle_blocks=found.idle,
        unrolled=unrolled,
        disturbed=times.disturbed,
        uncertainty=times.uncertainty,
        overlap=target.traits.overlap,
    )


def block_classes(jaxpr, axes: Mapping[str, int] = MappingProxyType({})) -> list[BlockClass]:
    """Returns the blocks and tags of a traced step, without options and with every price 0. Bytes
    are for one of the devices along `axes`, the mesh axes that divide the step's batch.
    """
    jobs = Jobs(False)
    graphs = [_opened(graph, jobs, axes) for graph in classes_of(find_blocks(jaxpr.jaxpr))]
    blocks = [block_class(graph, k, Allowed(), jobs) for k, graph in enumerate(graphs)]
    return [with_backwards(with_prices(block, lambda _: 0.0)) for block in blocks]


def _allowed(allowed: Allowed, graph: Opened, no_offload: set[str], traits: Platform) -> Allowed:
    """Returns the actions for the tags of one block.

    allowed: the actions of the plan.
    no_offload: labels of blocks without offload.
    """
    if graph.label in no_offload:
        allowed = allowed.without_offload()
    in_loops = allowed if _offloads_in_loops(graph, traits) else allowed.without_offload()
    return dataclasses.replace(allowed, in_loops=in_loops.actions)


def _offloads_in_loops(graph: Opened, traits: Platform) -> bool:
    """Whether tags inside loops of a block can be offloaded. If a loop runs the block, a loop in a
    loop stacks the offloaded tensors.
    """
    is_in_loop = any(i.loops for i in graph.graph.instances)
    return traits.offloads_nested or (traits.offloads_unrolled and not is_in_loop)


def _opened(graph: BlockGraph, jobs: Jobs, axes: Mapping[str, int]) -> Opened:
    """The block's operations, with the bytes of values as the block saves them."""
    return open_block(graph, lambda aval: jobs.stored(aval, max(1, graph.instance.stack)), axes)


def _unrolled(classes: Sequence[BlockGraph]) -> tuple[str, ...]:
    """Returns labels of blocks that follow each other without a loop: several instances of one
    layer each.
    """
    repeats: dict[str, list[int]] = {}
    for graph in classes:
        repeats.setdefault(graph.instance.label, []).extend(i.layers for i in graph.instances)
    alone = {label: layers for label, layers in repeats.items() if max(layers) == 1}
    return tuple(sorted(alone)) if sum(map(len, alone.values())) > 1 else ()


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
            " saves, and XLA does not compile that in host memory; take the gradient inside the"
            " outer loop, where it is one over microbatches"
        )


def _warn_of_loops(graphs: Iterable[Opened]) -> None:
    """Warns of tags inside loops of blocks, for which offload is left out."""
    names = {o.params["name"] for graph in graphs for o in graph.tags if o.in_loop}
    if names:
        warn(
            f"jaxmem: offload is left out for the tags {', '.join(map(repr, sorted(names)))}: they"
            " stand inside a loop of their block, and XLA does not compile what such a loop"
            " offloads; tag what the loop returns to have it offloaded"
        )


def _idle_tags(blocks: Sequence[BlockClass], names: set[str], saved: set[str]) -> tuple[str, ...]:
    """Returns names of tags that no block's backward reads, with a warning: but for tags that
    `jaxmem.auto` chose, which the user cannot move, and tags that another policy saves.

    names: the names of all tags.
    saved: names of tags that a policy saves with which a block's policy is combined.
    """
    idle = tuple(sorted(names - {t.name for b in blocks for t in b.tags}))
    warned = [name for name in idle if name not in saved]
    if warned and not all(is_auto(b.name) for b in blocks):
        warn(
            f"jaxmem: no block's backward reads the tags {', '.join(map(repr, warned))}: they stand"
            " outside every block, or only linear operations follow them; what a plan says of them"
            " changes nothing"
        )
    return idle
