"""The price of a given assignment, computed on each block's graph.

This cost model shares no code with the mixed-integer program (`program.py`), whose solutions it
checks. The price of a solution is always the price of this model.
"""

import dataclasses

from jaxmem._core.actions import KEEP, RECOMPUTE, UNTAGGED, Actions, Choice, is_whole
from jaxmem._core.profile import BlockClass, Equation, Option, Profile, Tag
from jaxmem.errors import SolverError, TagError


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """The cost of one block class under an assignment. Bytes, seconds, FLOPs and counts are of one
    layer.

    name: the block's label.
    recomputed: indices into `BlockClass.equations` of the equations that the backward repeats, in
      order.
    saved: the tags whose tensor is stored for the backward, with their choices. A name that is
      stored for several occurrences has one entry for each of them.
    raw_inputs: the values of `BlockClass.inputs` that are kept without a codec.
    device_bytes, host_bytes: bytes of the saved tensors, raw inputs included.
    doubt_seconds: the seconds by which the block with its lossy codecs must be faster than the
      block without a loss.
    recompute_seconds: seconds to repeat the equations.
    keep_seconds: seconds to write, read, encode and decode the saved tensors.
    exposed_seconds: the seconds of transfers that the block's own work does not hide.
    matmuls, flops: number of recomputed matrix products, and their FLOPs.
    lossy: names of the tags that are saved with a loss.
    host_seconds: the part of `seconds` that moves tensors to host memory and back, exposed
      transfers included.
    codec_seconds: the part of `seconds` that encodes, decodes, and keeps codes on the device.
    """

    name: str
    recomputed: tuple[int, ...]
    saved: tuple[tuple[str, Choice], ...]
    raw_inputs: tuple[int, ...]
    device_bytes: int
    host_bytes: int
    recompute_seconds: float
    keep_seconds: float
    exposed_seconds: float
    matmuls: int
    flops: float
    doubt_seconds: float = 0.0
    host_seconds: float = 0.0
    codec_seconds: float = 0.0
    lossy: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds that one run of the block takes in addition to an ideal run, which saves for free
        and recomputes nothing.
        """
        return self.recompute_seconds + self.keep_seconds + self.exposed_seconds


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a whole step under an assignment.

    Bytes are the bytes that all layers store at the same time. Seconds are in addition to a step
    that saves for free and recomputes nothing.

    saved_bytes, host_bytes: bytes of saved tensors in device memory, and in host memory.
    seconds: seconds of saving, transfers and recomputation.
    recompute_seconds: the part of `seconds` that repeats equations.
    doubt_seconds: the seconds by which the assignment must be faster than an assignment without
      its lossy codecs, because of the error bounds of times. They are not part of `seconds`.
    blocks: the costs of the block classes, aligned with `Profile.blocks`.
    host_seconds: the part of `seconds` that moves tensors to host memory and back.
    codec_seconds: the part of `seconds` that encodes, decodes, and keeps codes on the device.
    """

    saved_bytes: int
    host_bytes: int
    seconds: float
    recompute_seconds: float
    doubt_seconds: float
    blocks: tuple[BlockCost, ...]
    host_seconds: float = 0.0
    codec_seconds: float = 0.0

    @property
    def risk_adjusted_seconds(self) -> float:
        """The seconds by which assignments are ranked: `seconds`, with lossy codecs at the upper
        end of their error bounds. If two assignments are equally fast within the error bounds, the
        lossless assignment ranks first.
        """
        return self.seconds + self.doubt_seconds

    @property
    def is_lossy(self) -> bool:
        """Whether a codec changes the numbers that the backward reads, although a lossless choice
        was open.
        """
        return any(block.lossy for block in self.blocks)


def evaluate(profile: Profile, actions: Actions) -> Cost:
    """Prices `actions` (block label -> tag -> choice; an absent tag is recomputed) on the profiled
    step.

    A value is demanded if the backward reads it, or if a recomputed equation reads it. A demanded
    tag whose choice saves it is saved, and demands no other value. A tag that is not demanded costs
    nothing, whatever its choice, since partial evaluation drops it. In each run of a layer, a share
    `profile.overlap` of `forward_seconds` hides transfers of the forward, and the same share of
    `backward_seconds` and of the recomputation hides transfers of the backward.

    Raises TagError if `actions` names a block, tag or choice that the profile lacks. Raises
    SolverError if no equation and no input makes a demanded value.
    """
    _check_names(profile, actions)
    link = profile.link_bytes_per_second
    overlap = profile.overlap
    costs = tuple(_block_cost(b, actions.get(b.name, {}), link, overlap) for b in profile.blocks)
    pairs = list(zip(profile.blocks, costs))
    # Bytes count the layers whose tensors are alive at the same time, and seconds count runs. Under
    # gradient accumulation, a layer runs once for each microbatch, and stores the tensors of one
    # microbatch at a time.
    return Cost(
        saved_bytes=sum(b.layers * c.device_bytes + b.span_bytes for b, c in pairs),
        host_bytes=sum(b.layers * c.host_bytes for b, c in pairs),
        seconds=sum(b.runs * c.seconds + b.span_seconds for b, c in pairs),
        recompute_seconds=sum(b.runs * c.recompute_seconds + b.span_seconds for b, c in pairs),
        doubt_seconds=sum(b.runs * c.doubt_seconds for b, c in pairs),
        blocks=costs,
        host_seconds=sum(b.runs * c.host_seconds for b, c in pairs),
        codec_seconds=sum(b.runs * c.codec_seconds for b, c in pairs),
    )


def everything(profile: Profile) -> Cost:
    """Prices the step without any checkpoint: all tensors that the backward reads are kept, and no
    equation is recomputed.
    """
    return evaluate(profile, profile.everything_kept)


def effective(profile: Profile, actions: Actions, cost: Cost | None = None) -> Actions:
    """Returns the choices of `actions` that take effect: every tag is listed, and a tag that is not
    demanded is listed as recomputed. A block in which UNTAGGED is kept lists UNTAGGED alone.

    `cost` is `evaluate(profile, actions)`, if the caller has it.
    """
    cost, result = cost or evaluate(profile, actions), {}
    for block, paid in zip(profile.blocks, cost.blocks):
        # Block classes of one label share this entry: a tag is saved if any class demands it.
        choices = result.setdefault(block.name, {})
        if is_whole(actions.get(block.name, {})):
            choices[UNTAGGED] = KEEP
            continue
        for tag in block.tags:
            choices.setdefault(tag.name, RECOMPUTE)
        choices |= dict(paid.saved)
    return result


def tag_at(block: BlockClass, equation: Equation) -> Tag | None:
    """The entry of `block.tags` whose equation is `equation`; None for an equation that is not a
    tag.
    """
    if equation.tag is None:
        return None
    # A tag's equation is an identity, and `Tag.value` may be its input or its output. If two
    # equations of one name follow each other, the second one reads the result of the first one.
    tags = block.occurrences(equation.tag)
    return next(
        (t for end in (equation.outputs, equation.inputs) for t in tags if t.value in end), None
    )


def option_of(block: BlockClass, tag: Tag, choice: Choice) -> Option:
    """The price of a choice for a tag of the block. Raises TagError if the choice has no price."""
    for option in tag.options:
        if option.choice == choice:
            return option
    known = ", ".join(str(o.choice) for o in tag.options) or "none"
    raise TagError(
        f"tag {tag.name!r} of block {block.name!r}: choice `{choice}` has no price;"
        f" expected recompute or one of: {known}; profile the step with that choice"
    )


def keep_seconds_per_byte(block: BlockClass) -> float:
    """Seconds to keep one byte in this block: the mean over the keep options of its tags, and over
    its raw inputs.
    """
    kept = [(o.device_bytes, o.seconds) for t in block.tags for o in t.options if o.choice == KEEP]
    kept += [(block.values[v], s) for v, s in zip(block.inputs, block.input_seconds)]
    total = sum(b for b, _ in kept)
    return sum(s for _, s in kept) / total if total else 0.0


def _check_names(profile: Profile, actions: Actions) -> None:
    """Raises TagError for a label or a tag that the profile lacks. Idle blocks and tags may be
    named.
    """
    known: dict[str, set[str]] = {label: {UNTAGGED} for label in profile.idle_blocks}
    for b in profile.blocks:
        known.setdefault(b.name, {UNTAGGED}).update(t.name for t in b.tags)
    for label, choices in actions.items():
        if label not in known:
            raise TagError(
                f"`actions` names block {label!r}; the profiled step has {sorted(known)}"
            )
        if missing := sorted(choices.keys() - known[label] - set(profile.idle_tags)):
            raise TagError(
                f"`actions` names tags {missing} of block {label!r}; it has"
                f" {sorted(known[label] - {UNTAGGED})}"
            )


def _block_cost(
    block: BlockClass, choices: dict[str, Choice], link: float, overlap: float
) -> BlockCost:
    if is_whole(choices):
        return _everything_cost(block)
    # First: which values are demanded. Equations are in topological order, so that the loop from
    # the last equation meets every reader of a value before the equation that makes the value.
    free = set(block.free)
    demanded = set(block.needed) - free
    recomputed: list[int] = []
    saved: list[tuple[Tag, Option]] = []
    for i in reversed(range(len(block.equations))):
        equation = block.equations[i]
        if demanded.isdisjoint(equation.outputs):
            continue
        tag = tag_at(block, equation)
        choice = RECOMPUTE if tag is None else choices.get(tag.name, RECOMPUTE)
        if tag is not None and choice.action.stores:
            saved.append((tag, option_of(block, tag, choice)))
            continue
        if equation.tag is None:  # a recomputed tag is an identity, which costs nothing
            recomputed.append(i)
        demanded.update(v for v in equation.inputs if v not in free)
    recomputed.reverse()
    saved.reverse()
    raw = tuple(v for v in block.inputs if v in demanded)
    _check_origins(block, demanded)

    # Then: the cost of the saved and the recomputed values. A tensor crosses the link once to the
    # host, and once back in each backward. Other work hides each direction, so that the exposed
    # seconds of both add up.
    keeping = dict(zip(block.inputs, block.input_seconds))
    host = sum(o.host_bytes for _, o in saved)
    recompute_seconds = sum(block.equations[i].seconds for i in recomputed)
    transfer = host / link if host else 0.0
    exposed = max(0.0, transfer - overlap * block.forward_seconds)
    again = block.backwards * transfer  # each backward copies the tensors back
    exposed += max(0.0, again - overlap * (block.backward_seconds + recompute_seconds))
    return BlockCost(
        name=block.name,
        recomputed=tuple(recomputed),
        saved=tuple((t.name, o.choice) for t, o in saved),
        raw_inputs=raw,
        device_bytes=sum(o.device_bytes for _, o in saved) + sum(block.values[v] for v in raw),
        host_bytes=host,
        recompute_seconds=recompute_seconds,
        keep_seconds=sum(o.seconds for _, o in saved) + sum(keeping.get(v, 0.0) for v in raw),
        exposed_seconds=exposed,
        matmuls=sum(block.equations[i].matmuls for i in recomputed),
        flops=sum(block.equations[i].flops for i in recomputed),
        doubt_seconds=sum(o.doubt for _, o in saved),
        lossy=tuple(dict.fromkeys(t.name for t, o in saved if o.lossy)),
        host_seconds=exposed + sum(o.host_seconds for _, o in saved),
        codec_seconds=sum(o.seconds - o.host_seconds for _, o in saved if o.choice.action.encodes),
    )


def _everything_cost(block: BlockClass) -> BlockCost:
    """The cost of a block without a checkpoint, in which untagged tensors are kept too.

    Untagged tensors have no option with the price of keeping them. Their price is the mean price of
    the block.
    """
    size = block.everything_bytes
    raw = tuple(v for v in block.inputs if v in set(block.needed) - set(block.free))
    keeping = size * keep_seconds_per_byte(block)
    return BlockCost(block.name, (), (), raw, size, 0, 0.0, keeping, 0.0, 0, 0.0)


def _check_origins(block: BlockClass, demanded: set[int]) -> None:
    """Raises SolverError for a demanded value that no equation and no input makes. Its bytes would
    not be counted.
    """
    available = {o for e in block.equations for o in e.outputs} | set(block.inputs)
    if lost := sorted(demanded - available):
        raise SolverError(
            f"block {block.name!r}: value {lost[0]} is demanded, and no equation makes it, nor is"
            " it among `inputs` or `free`; the profile's graph is incomplete"
        )
