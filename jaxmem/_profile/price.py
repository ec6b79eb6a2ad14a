"""Makes a block class in two steps: `unpriced` before its times are known, `priced_class` after.

All classes of a step are drafted first, so that equal jobs are timed once.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxmem._core.actions import Action
from jaxmem._core.profile import BlockClass, Equation, Option, Tag
from jaxmem._jax.jaxpr import matmul_flops, nbytes
from jaxmem._jax.job import Job
from jaxmem._profile.blocks import Instance, is_tag
from jaxmem._profile.classes import graph_key
from jaxmem._profile.jobs import Jobs
from jaxmem._profile.options import UnpricedOption, options_of
from jaxmem._profile.segments import Graph, backward, forward, segments
from jaxmem.errors import TagError


@dataclasses.dataclass(frozen=True)
class UnpricedTag:
    """A tag of a block class before its times are known.

    name, kind: as the tag was given them.
    shape, dtype: those of its tensor, before a mesh divides it.
    value: the number of its tensor among the class's values.
    options: the choices open to it.
    """

    name: str
    kind: str | None
    shape: tuple[int, ...]
    dtype: str
    value: int
    options: tuple[UnpricedOption, ...]


@dataclasses.dataclass(frozen=True)
class Unpriced:
    """A block class that holds keys of jobs where the priced class will hold seconds.

    graph: the equations and values of its blocks.
    number: value of the flat jaxpr -> value of the class.
    shares: index of an equation -> (job key, share of its time).
    tags: the tags and their choices.
    inputs: the inputs that cost memory, each with the job key of keeping it.
    forward: the job key of the forward that keeps everything.
    backward: the job key of the derivative alone.
    """

    graph: Graph
    number: dict[int, int]
    shares: dict[int, tuple]
    tags: tuple[UnpricedTag, ...]
    inputs: tuple[tuple[int, tuple], ...]
    forward: tuple
    backward: tuple


def unpriced(graph: Graph, index: int, actions: Sequence[Action], codecs, jobs: Jobs) -> Unpriced:
    """Drafts the class number `index` of a step.

    graph: the equations and values of its blocks.
    index: keeps the keys of its jobs apart from those of other classes.
    actions, codecs: what `jaxmem.plan` was given.
    jobs: all the work that its prices need is added to it.

    Raises TagError for a tag name that stands twice.
    """
    avals = graph.instance.flat.avals
    read_or_made = {v for e in graph.equations for v in (*e.reads, *e.outputs)}
    # The flat jaxpr also numbers the derivative's values; the class numbers its own from 0.
    number = {v: i for i, v in enumerate(sorted(read_or_made | set(graph.needed)))}
    shares = {}
    # Times are those of fused segments, since XLA runs no equation alone; each equation has its
    # share of its segment's.
    for k, segment in enumerate(segments(graph)):
        if not segment.avals:  # a constant, which XLA folds into what reads it
            continue
        jobs.add((index, "segment", k), Job(segment.function, segment.avals))
        for i, weight in zip(segment.equations, segment.weights):
            shares[i] = ((index, "segment", k), weight)
    tags: dict[str, UnpricedTag] = {}
    for e in graph.equations:
        if not is_tag(e.eqn):
            continue
        name, aval = e.eqn.params["name"], avals[e.outputs[0]]
        if name in tags:
            raise TagError(
                f"profile: tag {name!r} stands twice in block {graph.instance.label!r}; names are"
                " unique within a block: rename one"
            )
        options = options_of(e, aval, index, actions, codecs, jobs)
        kind, shape = e.eqn.params.get("kind"), tuple(aval.shape)
        tags[name] = UnpricedTag(name, kind, shape, str(aval.dtype), number[e.outputs[0]], options)
    charged = [v for v in graph.instance.charged if v in number]
    inputs = tuple((v, jobs.keep(nbytes(avals[v]))) for v in charged)
    jobs.add((index, "forward"), Job(*forward(graph)))
    jobs.add((index, "backward"), Job(*backward(graph)))
    ends = (index, "forward"), (index, "backward")
    return Unpriced(graph, number, shares, tuple(tags.values()), inputs, *ends)


def priced_class(
    made: Unpriced, instances: Sequence[Instance], price: Mapping[tuple, float], shards: int
) -> BlockClass:
    """Returns the class with its prices, for one device.

    made: its draft.
    instances: the class's blocks.
    price: seconds by job key, of work that is not divided.
    shards: over how many devices the block's tensors, and so bytes and seconds, are divided.
    """
    graph, number = made.graph, made.number
    instance, avals = graph.instance, graph.instance.flat.avals
    charged = [v for v, _ in made.inputs]
    # What depends on no input is free: a loop over layers holds it once, as it does parameters.
    produced = {o for e in graph.equations for o in e.outputs} - graph.fixed
    flops = sum(matmul_flops(e.eqn)[0] for e in instance.flat.equations)
    return BlockClass(
        name=instance.label,
        fingerprint=graph_key(graph),
        layers=sum(i.layers for i in instances),
        runs=sum(i.runs for i in instances),
        values=tuple(_of_device(nbytes(avals[v]), shards) for v in sorted(number)),
        inputs=tuple(number[v] for v in charged),
        input_seconds=tuple(price[key] / shards for _, key in made.inputs),
        free=tuple(n for v, n in number.items() if v not in produced and v not in charged),
        needed=tuple(number[v] for v in graph.needed),
        equations=_equations(made, price, shards),
        tags=tuple(_tag(tag, price, shards) for tag in made.tags),
        forward_seconds=price[made.forward] / shards,
        backward_seconds=price[made.backward] / shards,
        flops=flops / shards,
        # Not if the loop over the layers runs twice: a group would be of half of them.
        stacked={i.divisible for i in instances} == {sum(i.layers for i in instances)},
        shards=shards,
    )


def _equations(made: Unpriced, price: Mapping, shards: int) -> tuple[Equation, ...]:
    """Returns all equations but those that depend on no input, which a loop over layers computes
    once.
    """
    found = []
    for i, e in enumerate(made.graph.equations):
        if made.graph.fixed.issuperset(e.outputs):
            continue
        # Tags, and segments without arguments, have no job: they take no time.
        key, share = made.shares.get(i, (None, 0.0))
        flops, matmuls = matmul_flops(e.eqn)
        found.append(
            Equation(
                primitive=e.eqn.primitive.name,
                inputs=tuple(made.number[v] for v in e.reads),
                outputs=tuple(made.number[v] for v in e.outputs),
                seconds=price[key] * share / shards if key else 0.0,
                flops=flops / shards,
                matmuls=matmuls,
                tag=e.eqn.params["name"] if is_tag(e.eqn) else None,
            )
        )
    return tuple(found)


def _tag(tag: UnpricedTag, price: Mapping, shards: int) -> Tag:
    options = (
        Option(
            choice=o.choice,
            device_bytes=_of_device(o.device_bytes, shards),
            host_bytes=_of_device(o.host_bytes, shards),
            seconds=sum(price[key] for key in o.jobs) / shards,
        )
        for o in tag.options
    )
    return Tag(tag.name, tag.kind, tag.shape, tag.dtype, tag.value, tuple(options))


def _of_device(size: int, shards: int) -> int:
    """The part of `size` bytes that one of `shards` devices holds, rounded up."""
    return -(-size // shards)
