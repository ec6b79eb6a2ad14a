"""Makes a block class in two steps: `unpriced` before its times are known, `priced_class` after.

All classes of a step are drafted first, so that equal jobs are timed once.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxmem._core.profile import BlockClass, Equation, Option, Tag
from jaxmem._cost.blocks.classes import at_once, graph_key
from jaxmem._cost.blocks.find import Instance
from jaxmem._cost.blocks.opened import Opened, opened
from jaxmem._cost.blocks.segments import BlockGraph, backward, forward, segments
from jaxmem._cost.profile.jobs import Jobs
from jaxmem._cost.profile.options import Allowed, Place, UnpricedOption, options_of
from jaxmem._trace.jaxpr import matmul_flops
from jaxmem._trace.job import Job


@dataclasses.dataclass(frozen=True)
class UnpricedTag:
    """A tag of a block class before its times are known.

    name, kind: as the tag was given them.
    shape, dtype: those of its tensor, before a mesh divides it.
    value: the number of its tensor among the class's values.
    options: the choices open to it.
    turns: how many such tensors one layer saves.
    shards: over how many devices its tensor is divided.
    """

    name: str
    kind: str | None
    shape: tuple[int, ...]
    dtype: str
    value: int
    options: tuple[UnpricedOption, ...]
    turns: int
    shards: int


@dataclasses.dataclass(frozen=True)
class Unpriced:
    """A block class that holds keys of jobs where the priced class will hold seconds.

    graph: the equations and values of its blocks.
    opened: its operations, with loops that hold tags opened.
    number: value of `opened` -> value of the class.
    shares: index of an equation -> (job key, share of its time).
    tags: the tags and their choices.
    inputs: the inputs that cost memory, each with the job keys of keeping it.
    forward: the job key of the forward that keeps everything.
    backward: the job key of the derivative alone.
    shards: over how many devices the block's tensors, and so bytes and seconds, are divided.
    """

    graph: BlockGraph
    opened: Opened
    number: dict[int, int]
    shares: dict[int, tuple]
    tags: tuple[UnpricedTag, ...]
    inputs: tuple[tuple[int, tuple], ...]
    forward: tuple
    backward: tuple
    shards: int


def unpriced(
    graph: BlockGraph, index: int, allowed: Allowed, jobs: Jobs, axes: Mapping[str, int]
) -> Unpriced:
    """Drafts the class number `index` of a step.

    graph: the equations and values of its blocks.
    index: keeps the keys of its jobs apart from those of other classes.
    allowed: what may be chosen from.
    jobs: all the work that its prices need is added to it.
    axes: size by name of the mesh axes that divide the step's batch.

    Raises TagError for a name whose places ask for different codecs.
    """
    # Inside `jax.shard_map` shapes are one device's already, so that nothing is divided again.
    axes = {} if graph.instance.sharded else axes
    stacked = graph.instance.repeats.loops > 0
    stack = graph.instance.layers if stacked else 0
    stored = lambda aval: jobs.stored(aval, max(1, stack))
    avals, inside = graph.instance.flat.avals, opened(graph, stored, axes)
    read_or_made = {v for o in inside.operations for v in (*o.reads, *o.outputs)}
    # The flat jaxpr also numbers the derivative's values; the class numbers its own from 0.
    number = {v: i for i, v in enumerate(sorted(read_or_made | set(inside.needed)))}
    shares = {}
    # Times are those of fused segments, since XLA runs no equation alone; each equation has its
    # share of its segment's.
    for k, segment in enumerate(segments(graph)):
        # A constant is folded into what reads it, and views take no time: neither can be timed.
        if not segment.avals or not any(segment.weights):
            continue
        jobs.add((index, "segment", k), Job(segment.function, segment.avals, axes))
        for i, weight in zip(segment.equations, segment.weights):
            shares[i] = ((index, "segment", k), weight)
    shards = math.prod(axes.values())
    tags = _tags(inside, number, index, graph.instance.label, allowed, jobs, stack, shards)
    charged = [v for v in graph.instance.charged if v in number]
    inputs = tuple((v, jobs.keep(stored(avals[v]), stacked)) for v in charged)
    jobs.add((index, "forward"), Job(*forward(graph), axes))
    jobs.add((index, "backward"), Job(*backward(graph), axes))
    ends = (index, "forward"), (index, "backward")
    return Unpriced(graph, inside, number, shares, tags, inputs, *ends, shards)


def _tags(
    inside: Opened,
    number: Mapping[int, int],
    index: int,
    label: str,
    allowed: Allowed,
    jobs: Jobs,
    stack: int,
    shards: int,
) -> tuple[UnpricedTag, ...]:
    """The tags of a class, one for each place, those of a name together."""
    by_name: dict[str, list[tuple[Place, int, int]]] = {}
    for o in inside.operations:
        if o.tag is not None:
            place = Place(o.tag, o.turns, o.looped, stack)
            one = place, number[o.outputs[0]], shards // o.devices
            by_name.setdefault(o.tag.params["name"], []).append(one)
    found = []
    for name, places in by_name.items():
        outliers = allowed.outliers.get(label, {}).get(name)
        options = options_of([p for p, *_ in places], (index, name), allowed, jobs, outliers)
        for (place, value, parts), choices in zip(places, options):
            kind, aval = place.eqn.params.get("kind"), place.aval
            tensor = kind, tuple(aval.shape), str(aval.dtype), value
            found.append(UnpricedTag(name, *tensor, choices, place.turns, parts))
    return tuple(found)


def priced_class(
    made: Unpriced, instances: Sequence[Instance], price: Mapping[tuple, float]
) -> BlockClass:
    """Returns the class with its prices, for one device.

    made: its draft.
    instances: the class's blocks.
    price: seconds by job key, of work that is not divided.
    """
    number, inside, shards = made.number, made.opened, made.shards
    instance = made.graph.instance
    charged = [v for v, _ in made.inputs]
    # What depends on no input is free: a loop over layers holds it once, as it does parameters.
    produced = {v for o in inside.operations for v in o.outputs} - inside.fixed
    flops = sum(matmul_flops(e.eqn)[0] for e in instance.flat.equations)
    return BlockClass(
        name=instance.label,
        fingerprint=graph_key(made.graph),
        layers=at_once((i, i.layers) for i in instances),
        runs=sum(i.runs for i in instances),
        values=tuple(_of_device(inside.sizes[v], shards) for v in sorted(number)),
        inputs=tuple(number[v] for v in charged),
        input_seconds=tuple(sum(price[k] for k in keys) / shards for _, keys in made.inputs),
        free=tuple(n for v, n in number.items() if v not in produced and v not in charged),
        needed=tuple(number[v] for v in inside.needed),
        equations=_equations(made, price, shards),
        tags=tuple(_tag(tag, price) for tag in made.tags),
        forward_seconds=price[made.forward] / shards,
        backward_seconds=price[made.backward] / shards,
        flops=flops / shards,
        divisible=_divisible(instances),
        shards=shards,
    )


def _divisible(instances: Sequence[Instance]) -> int:
    """The number of layers in the loop if this class is all of them and a plan may divide them;
    else 0.
    """
    (several, *others) = {i.divisible for i in instances}
    if others or not several:
        return 0
    # Loops over some of the layers each, such as those of one stack in two memories, and the layers
    # of a Python loop, have to be here together.
    return several if at_once((i, i.layers) for i in instances) % several == 0 else 0


def _equations(made: Unpriced, price: Mapping, shards: int) -> tuple[Equation, ...]:
    """Returns all operations but those that depend on no input, which a loop over layers computes
    once.
    """
    found = []
    for o in made.opened.operations:
        if made.opened.fixed.issuperset(o.outputs):
            continue
        # Tags, and segments without arguments, have no job: they take no time.
        key, share = made.shares.get(o.whole, (None, 0.0))
        found.append(
            Equation(
                primitive=o.primitive,
                inputs=tuple(made.number[v] for v in o.reads),
                outputs=tuple(made.number[v] for v in o.outputs),
                seconds=price[key] * share * o.share / shards if key else 0.0,
                flops=o.flops / shards,
                matmuls=o.matmuls,
                tag=o.tag.params["name"] if o.tag is not None else None,
            )
        )
    return tuple(found)


def _tag(tag: UnpricedTag, price: Mapping) -> Tag:
    options = (
        Option(
            choice=o.choice,
            device_bytes=_of_device(o.device_bytes, tag.shards),
            host_bytes=_of_device(o.host_bytes, tag.shards),
            seconds=_seconds(o, tag.turns, price) / tag.shards,
        )
        for o in tag.options
    )
    tensor = tag.name, tag.kind, tag.shape, tag.dtype, tag.value
    return Tag(*tensor, tuple(options), tag.turns, tag.shards)


def _seconds(option: UnpricedOption, turns: int, price: Mapping) -> float:
    return turns * sum(price[k] for k in option.each) + sum(price[k] for k in option.jobs)


def _of_device(size: int, shards: int) -> int:
    """The part of `size` bytes that one of `shards` devices holds, rounded up."""
    return -(-size // shards)
