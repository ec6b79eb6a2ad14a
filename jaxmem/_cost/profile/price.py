"""Makes the block classes of a step: `block_class` with work instead of seconds, and
`with_prices` with the seconds of that work.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmem._core.profile import BlockClass, Equation, Option, Tag
from jaxmem._cost.blocks.classes import at_once, graph_key
from jaxmem._cost.blocks.find import Instance
from jaxmem._cost.blocks.loops import Operation
from jaxmem._cost.blocks.opened_block import Opened
from jaxmem._cost.blocks.segments import BlockGraph, backward, forward, segments
from jaxmem._cost.profile.jobs import Jobs, Untimed
from jaxmem._cost.profile.options import Allowed, options_of
from jaxmem._trace.jaxpr import matmul_flops, per_device


def block_class(block: Opened, index: int, allowed: Allowed, jobs: Jobs) -> BlockClass:
    """Returns the class number `index` of a step, for one device. Its seconds are `Untimed`.

    block: the operations and values of the class's blocks.
    index: keeps the keys of the class's jobs apart from the keys of other classes.
    allowed: the actions and codecs to choose from.
    jobs: collects the work whose times are the prices of the class.

    Raises TagError for a name whose occurrences ask for different codecs.
    """
    graph, shards = block.graph, block.shards
    instance, flat = graph.instance, graph.instance.flat
    read_or_made = {v for o in block.operations for v in (*o.reads, *o.outputs)}
    # The flat jaxpr also numbers the derivative's values; the class numbers its own from 0.
    number = {v: i for i, v in enumerate(sorted(read_or_made | set(block.needed)))}
    equations = _equations(block, number, _shares(block, index, jobs))
    tags = _tags(block, number, index, allowed, jobs)
    charged = [v for v in instance.charged if v in number]
    stored = [jobs.stored(flat.avals[v], max(1, instance.stack)) for v in charged]
    kept = [jobs.keep(size, instance.stack > 0) for size in stored]
    whole = lambda *keys: Untimed((key, 1 / shards) for key in keys)
    jobs.by_key[index, "forward"] = forward(graph, block.axes)
    jobs.by_key[index, "backward"] = backward(graph, block.axes)
    # What depends on no input is free: a loop over layers holds it once, as it does parameters.
    produced = {v for o in block.operations for v in o.outputs} - block.fixed
    products = [matmul_flops(e.eqn)[0] for e in flat.nodes]
    there, back = sum(products[: instance.boundary]), sum(products[instance.boundary :])
    return BlockClass(
        name=block.label,
        fingerprint=graph_key(graph),
        layers=at_once((i, i.layers) for i in graph.instances),
        runs=sum(i.runs for i in graph.instances),
        values=tuple(per_device(block.sizes[v], shards) for v in sorted(number)),
        inputs=tuple(number[v] for v in charged),
        input_seconds=tuple(whole(*keys) for keys in kept),
        free=tuple(n for v, n in number.items() if v not in produced and v not in charged),
        needed=tuple(number[v] for v in block.needed),
        equations=equations,
        tags=tags,
        forward_seconds=whole((index, "forward")),
        backward_seconds=whole((index, "backward")),
        flops=(there + instance.backwards * back) / shards,
        divisible=_divisible(graph.instances),
        shards=shards,
        backwards=instance.backwards,
        rerun_seconds=_rerun(graph, index, shards),
        loop=instance.loop if instance.loop != block.label else "",
    )


def with_backwards(block: BlockClass) -> BlockClass:
    """Returns the class, whose prices are of one forward and one backward, with the prices of one
    forward and all its backwards. Each backward repeats the recomputed equations, and reads the
    saved tensors.
    """
    n = block.backwards
    if n == 1:
        return block
    # Half of the seconds of a saved tensor are its writing or encoding, and half are its reading or
    # decoding.
    share = (1 + n) / 2
    replace = dataclasses.replace
    again = lambda e: replace(e, seconds=n * e.seconds, flops=n * e.flops, matmuls=n * e.matmuls)
    saved = lambda o: replace(o, seconds=share * o.seconds, host_seconds=share * o.host_seconds)
    return replace(
        block,
        equations=tuple(map(again, block.equations)),
        tags=tuple(replace(t, options=tuple(map(saved, t.options))) for t in block.tags),
        input_seconds=tuple(share * s for s in block.input_seconds),
        backward_seconds=n * block.backward_seconds,
        rerun_seconds=None if block.rerun_seconds is None else n * block.rerun_seconds,
    )


def with_prices(block: BlockClass, seconds: Callable[[tuple], float]) -> BlockClass:
    """Returns the class with seconds instead of work.

    seconds: returns the seconds of the job under a key, of work that is not divided.
    """

    def timed(value: Any) -> Any:
        if isinstance(value, Untimed):
            return value.timed(seconds)
        if isinstance(value, tuple):
            return tuple(map(timed, value))
        if isinstance(value, BlockClass | Equation | Tag | Option):
            found = {f.name: timed(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **found)
        return value

    return timed(block)


def _shares(block: Opened, index: int, jobs: Jobs) -> dict[int, list[tuple[tuple, float]]]:
    """By index of an equation: the key of its segment's job, and the equation's share of the
    segment's time. XLA fuses equations, and runs none alone.
    """
    shares: dict[int, list[tuple[tuple, float]]] = {}
    for k, (job, parts) in enumerate(segments(block.graph, block.axes)):
        jobs.by_key[index, "segment", k] = job
        shares |= {i: [((index, "segment", k), share)] for i, share in parts.items()}
    return shares


def _equations(
    block: Opened, number: Mapping[int, int], shares: Mapping[int, list[tuple[tuple, float]]]
) -> tuple[Equation, ...]:
    """Returns all operations but those that depend on no input, which a loop over layers computes
    once.
    """
    found = []
    for o in block.operations:
        if block.fixed.issuperset(o.outputs):
            continue
        # Tags, and segments without arguments, have no job: they take no time.
        pieces = [(k, part * o.share / block.shards) for k, part in shares.get(o.whole, ())]
        found.append(
            Equation(
                primitive=o.primitive,
                inputs=tuple(number[v] for v in o.reads),
                outputs=tuple(number[v] for v in o.outputs),
                seconds=Untimed(pieces),
                flops=o.flops / block.shards,
                matmuls=o.matmuls,
                tag=o.params["name"] if o.tag is not None else None,
            )
        )
    return tuple(found)


def _tags(
    block: Opened, number: Mapping[int, int], index: int, allowed: Allowed, jobs: Jobs
) -> tuple[Tag, ...]:
    """The tags of a class, one for each occurrence, those of one name together."""
    by_name: dict[str, list[Operation]] = {}
    for o in block.tags:
        by_name.setdefault(o.params["name"], []).append(o)
    found = []
    for name, tags in by_name.items():
        options = options_of(tags, (index, name), allowed, jobs, block)
        for o, open_to_it in zip(tags, options):
            kind, value = o.params.get("kind"), number[o.outputs[0]]
            tensor = kind, tuple(o.aval.shape), str(o.aval.dtype), value
            found.append(Tag(name, *tensor, open_to_it, o.turns, block.shards // o.devices))
    return tuple(found)


def _rerun(graph: BlockGraph, index: int, shards: int) -> Untimed | None:
    """Returns the work of a layer's whole forward, if a plan may run the layers of this class in
    spans; else None.

    The job of the class's forward is without operations that no derivative needs, such as the last
    product. The whole forward takes longer in proportion to the FLOPs.
    """
    one, several = graph.instance, graph.instances
    in_one_loop = {(i.body, i.loops, i.layers) for i in several} == {(one.body, 1, one.divisible)}
    # The layers of a Python loop are one instance each.
    unrolled = len(several) == one.divisible and all((i.loops, i.layers) == (0, 1) for i in several)
    if not all(i.loop for i in several) or not (in_one_loop or unrolled):
        return None
    needed = sum(matmul_flops(e.eqn)[0] for e in graph.equations)
    share = max(1.0, one.forward_flops / needed) if needed else 1.0
    return Untimed([((index, "forward"), share / shards)])


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
