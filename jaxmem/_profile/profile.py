"""Traced step -> Profile: blocks, tags, what the backward needs, bytes, and times on the target."""

import dataclasses
import hashlib
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._codecs import registry
from jaxmem._core.actions import Action, Choice
from jaxmem._core.profile import BlockClass, Equation, Option, Profile, Tag
from jaxmem._device.target import Target
from jaxmem._jax.jaxpr import describe, matmul_flops, nbytes
from jaxmem._profile.blocks import find_blocks, is_tag
from jaxmem._profile.jobs import Jobs
from jaxmem._profile.segments import Graph, backward, forward, graph_of, segments
from jaxmem._profile.times import Job, job_seconds
from jaxmem._tags.tag import tag_p
from jaxmem.errors import JaxmemWarning, StepError, TagError

NO_BLOCK = (
    "profile: the step has no block: no jax.checkpoint region with a jaxmem policy {why}. Wrap each"
    " layer:"
    " jax.checkpoint(layer, policy=jaxmem.remat_policy(plan)), nn.remat(Layer, policy=...) or"
    " nnx.remat(layer, policy=...),"
    " with the plan that `build` is given"
)


def profile(
    jaxpr,
    target: Target,
    *,
    actions: Sequence[Action],
    codecs=None,
    shards: int = 1,
    compiler=None,
    database=None,
) -> Profile:
    """What was learned of a step from its jaxpr, traced with every tag recomputed.

    `shards`: over how many devices each block's tensors are divided. `codecs`: those that may
    compress a tag, by kind or for every kind; None means the kind's own. Raises StepError where no
    block is found, TagError for a tag name that stands twice in one block.
    """
    classes, tag_names = _classes(jaxpr)
    jobs = Jobs(target.local)
    unrolled = (
        _unrolled(classes)
        if target.platform == "cuda" and any(a.offloads for a in actions)
        else set()
    )
    drafts = []
    for number, (graph, instances) in enumerate(classes):
        carried_out = [a for a in actions if not (a.offloads and instances[0].label in unrolled)]
        drafts.append(_draft(graph, number, carried_out, codecs, jobs))
    seconds, source = job_seconds(jobs.jobs, target, compiler, database)
    price = jobs.prices(seconds)
    blocks = [
        _finish(draft, instances, price, 1 if instances[0].sharded else shards)
        for draft, (_, instances) in zip(drafts, classes)
    ]
    blocks = _with_idle_tags(blocks, tag_names)
    step = sum(b.runs * (b.forward_seconds + b.backward_seconds) for b in blocks)
    return Profile(
        fingerprint=fingerprint(blocks),
        blocks=tuple(blocks),
        target=target.name,
        link_bytes_per_second=target.link,
        step_seconds=step,
        time_source=source,
    )


def _unrolled(classes) -> set[str]:
    """Labels of blocks that a Python loop repeats, for which offload is left out, with a warning."""
    repeats: dict[str, list[int]] = {}
    for _, instances in classes:
        repeats.setdefault(instances[0].label, []).extend(i.layers for i in instances)
    labels = {label for label, layers in repeats.items() if len(layers) > 1 and max(layers) == 1}
    if labels:
        warnings.warn(
            f"jaxmem: offload is left out for block {', '.join(map(repr, sorted(labels)))}: its"
            " layers are unrolled in"
            " Python, and XLA:GPU would keep what they offload on the device; loop over the layers"
            " with jax.lax.scan",
            JaxmemWarning,
            stacklevel=4,
        )
    return labels


def _classes(jaxpr) -> tuple[list[tuple[Graph, list]], set[str]]:
    """The block classes of a traced step with their instances, and the names of all its tags."""
    found = find_blocks(jaxpr.jaxpr)
    if not found.instances:
        why = (
            "is differentiated: the blocks are there, but no gradient is taken through them"
            if found.undifferentiated
            else "is in it"
        )
        raise StepError(NO_BLOCK.format(why=why))
    return _group([(i, graph_of(i)) for i in found.instances]), found.tag_names


def block_classes(jaxpr) -> list[BlockClass]:
    """The blocks and tags of a traced step, without prices."""
    classes, _ = _classes(jaxpr)
    jobs = Jobs(False)
    drafts = [_draft(graph, number, (), None, jobs) for number, (graph, _) in enumerate(classes)]
    free = jobs.prices([0.0] * len(jobs.keys))
    return [_finish(draft, instances, free, 1) for draft, (_, instances) in zip(drafts, classes)]


def fingerprint(blocks: Iterable[BlockClass]) -> str:
    """Of what a plan is tied to: labels, layers, and each tag's name, shape and dtype. The same on
    every JAX version.
    """
    lines = sorted(
        f"{b.name} {b.layers} {t.name} {t.shape} {t.dtype}" for b in blocks for t in b.tags
    )
    lines += sorted(f"{b.name} {b.layers}" for b in blocks)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A block class before its times are known: equation and option prices are sums of job keys."""

    graph: Graph
    number: dict[int, int]  # value of the flat jaxpr -> value of the class
    shares: dict[int, tuple]  # equation -> (job key, share)
    tags: tuple[tuple[Tag, tuple[tuple[Option, tuple], ...]], ...]  # option, job keys
    inputs: tuple[tuple[int, tuple], ...]  # charged input, job key of keeping it
    whole: tuple[
        tuple, tuple
    ]  # job keys of the forward that keeps everything, and of the derivative
    fingerprint: str


def _group(found) -> list[tuple[Graph, list]]:
    """Graphs that are equal, under one label, with all their instances."""
    classes: dict[tuple, tuple[Graph, list]] = {}
    for instance, graph in found:
        key = (
            instance.label,
            _fingerprint(graph),
            instance.layers,
            instance.runs,
            instance.charged,
        )
        classes.setdefault(key, (graph, []))[1].append(instance)
    return list(classes.values())


def _fingerprint(graph: Graph) -> str:
    avals = graph.instance.flat.avals
    order = itertools.count()
    number: dict[int, int] = {}
    lines = []
    for e in graph.equations:
        for v in (*e.reads, *e.outputs):
            if v not in number:
                number[v] = next(order)
        name = e.eqn.params["name"] if is_tag(e.eqn) else ""
        lines.append(
            f"{name} {describe(e, avals)} {[number[v] for v in e.reads]}"
            f" {[number[v] for v in e.outputs]}"
        )
    lines.append(f"{sorted(number.get(v, -1) for v in graph.needed)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _draft(graph: Graph, index: int, actions, codecs, jobs: Jobs) -> _Draft:
    avals = graph.instance.flat.avals
    values = sorted(
        {v for e in graph.equations for v in (*e.reads, *e.outputs)} | set(graph.needed)
    )
    number = {v: i for i, v in enumerate(values)}
    shares = {}
    for k, segment in enumerate(segments(graph)):
        if not segment.avals:  # a constant, which XLA folds into what reads it
            continue
        jobs.add((index, "segment", k), Job(segment.function, segment.avals))
        for i, weight in zip(segment.equations, segment.weights):
            shares[i] = ((index, "segment", k), weight)
    tags, seen = [], set()
    for e in graph.equations:
        if not is_tag(e.eqn):
            continue
        name = e.eqn.params["name"]
        if name in seen:
            raise TagError(
                f"profile: tag {name!r} stands twice in block {graph.instance.label!r}; names are"
                " unique within a block: rename one"
            )
        seen.add(name)
        tags.append(
            _tag(e, avals[e.outputs[0]], number[e.outputs[0]], index, actions, codecs, jobs)
        )
    inputs = tuple((v, jobs.keep(nbytes(avals[v]))) for v in graph.instance.charged if v in number)
    whole = (index, "forward"), (index, "backward")
    jobs.add(whole[0], Job(*forward(graph)))
    jobs.add(whole[1], Job(*backward(graph)))
    return _Draft(graph, number, shares, tuple(tags), inputs, whole, _fingerprint(graph))


def _tag(equation, aval, value: int, index: int, actions, codecs, jobs: Jobs):
    name, ours = equation.eqn.params["name"], equation.eqn.primitive is tag_p
    kind = equation.eqn.params.get("kind")
    size, options = nbytes(aval), []
    if Action.KEEP in actions:
        options.append((Option(Choice(Action.KEEP), size, 0, 0.0), (jobs.keep(size),)))
    if Action.OFFLOAD in actions:
        options.append((Option(Choice(Action.OFFLOAD), 0, size, 0.0), (jobs.keep(size),) * 2))
    compressing = [a for a in actions if a.compresses] if ours else []
    for codec in _codecs_of(equation.eqn.params, aval, codecs) if compressing else ():
        try:
            codes = codec.nbytes(aval.shape, aval.dtype)
            encoded = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        except TagError:  # this codec does not take this tensor
            continue
        if codes >= size:
            continue
        keys = ((index, name, str(codec), "encode"), (index, name, str(codec), "decode"))
        decode = lambda *c, codec=codec: codec.decode(c, aval.shape, aval.dtype)
        jobs.add(keys[0], Job(codec.encode, (aval,)))
        jobs.add(keys[1], Job(decode, tuple(encoded)))
        for action in compressing:
            choice = Choice(action, str(codec))
            if action.offloads:
                options.append((Option(choice, 0, codes, 0.0), (*keys, *(jobs.keep(codes),) * 2)))
            else:
                options.append((Option(choice, codes, 0, 0.0), (*keys, jobs.keep(codes))))
    return Tag(name, kind, tuple(aval.shape), str(aval.dtype), value, ()), tuple(options)


def _codecs_of(params: Mapping, aval, codecs) -> Iterable:
    kind = params.get("kind")
    if params.get("codec") is not None:
        return [registry.parse(params["codec"])]
    if isinstance(codecs, Mapping) and kind in codecs:
        chosen = codecs[kind]
    elif codecs is None or isinstance(codecs, Mapping):
        chosen = registry.default_for("mask" if aval.dtype == jnp.bool_ else kind)
    else:
        chosen = codecs
    several: Any = [chosen] if isinstance(chosen, str) or hasattr(chosen, "encode") else chosen
    return [registry.parse(str(c)) for c in several]


def _finish(draft: _Draft, instances, price, shards: int) -> BlockClass:
    graph, number = draft.graph, draft.number
    instance, avals = graph.instance, graph.instance.flat.avals
    of_device = lambda size: -(-size // shards)
    equations = []
    for i, e in enumerate(graph.equations):
        if graph.fixed.issuperset(e.outputs):
            continue
        key, share = draft.shares.get(i, (None, 0.0))
        flops, matmuls = matmul_flops(e.eqn)
        equations.append(
            Equation(
                primitive=e.eqn.primitive.name,
                inputs=tuple(number[v] for v in e.reads),
                outputs=tuple(number[v] for v in e.outputs),
                seconds=price[key] * share / shards if key else 0.0,
                flops=flops / shards,
                matmuls=matmuls,
                tag=e.eqn.params["name"] if is_tag(e.eqn) else None,
            )
        )
    tags = []
    for tag, options in draft.tags:
        priced = [
            Option(
                o.choice,
                of_device(o.device_bytes),
                of_device(o.host_bytes),
                sum(price[k] for k in keys) / shards,
            )
            for o, keys in options
        ]
        tags.append(dataclasses.replace(tag, options=tuple(priced)))
    charged = [v for v, _ in draft.inputs]
    produced = {o for e in graph.equations for o in e.outputs} - graph.fixed
    flops = sum(matmul_flops(e.eqn)[0] for e in instance.flat.equations)
    return BlockClass(
        name=instance.label,
        fingerprint=draft.fingerprint,
        layers=sum(i.layers for i in instances),
        runs=sum(i.runs for i in instances),
        values=tuple(of_device(nbytes(avals[v])) for v in sorted(number)),
        inputs=tuple(number[v] for v in charged),
        input_seconds=tuple(price[key] / shards for _, key in draft.inputs),
        free=tuple(n for v, n in number.items() if v not in produced and v not in charged),
        needed=tuple(number[v] for v in graph.needed),
        equations=tuple(equations),
        tags=tuple(tags),
        forward_seconds=price[draft.whole[0]] / shards,
        backward_seconds=price[draft.whole[1]] / shards,
        flops=flops / shards,
        stacked=all(i.stacked for i in instances),
    )


def _with_idle_tags(blocks: list[BlockClass], names: set[str]) -> list[BlockClass]:
    idle = tuple(sorted(names - {t.name for b in blocks for t in b.tags}))
    if idle:
        warnings.warn(
            f"jaxmem: no block's backward reads the tags {', '.join(map(repr, idle))}: they stand"
            " outside every block, or"
            " only linear operations follow them; what a plan says of them changes nothing",
            JaxmemWarning,
            stacklevel=4,
        )
    return [dataclasses.replace(b, idle_tags=idle) for b in blocks]
