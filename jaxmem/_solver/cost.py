"""The price of a given assignment, by closure over each block's graph. Knows nothing of the solver
that it checks.
"""

import dataclasses

from jaxmem._core.actions import KEEP, RECOMPUTE, REST, Actions, Choice
from jaxmem._core.profile import BlockClass, Equation, Option, Profile, Tag
from jaxmem.errors import SolverError, TagError


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """One block class under an assignment. Bytes, seconds, FLOPs and counts are those of one
    layer.
    """

    name: str
    recomputed: tuple[int, ...]  # equations that the backward repeats, in order
    # tags whose tensor the backward reads from where it was stored
    saved: tuple[tuple[str, Choice], ...]
    raw_inputs: tuple[int, ...]  # of `BlockClass.inputs`: kept as they are
    wasted: tuple[str, ...]  # saved tags whose tensor is recomputed, or kept raw, all the same
    device_bytes: int
    host_bytes: int
    recompute_seconds: float
    keep_seconds: float  # writing, reading, encoding and decoding what is saved
    exposed_seconds: float  # of transfers, what the block's own work does not hide
    matmuls: int  # matrix products that are recomputed
    flops: float  # theirs

    @property
    def seconds(self) -> float:
        return self.recompute_seconds + self.keep_seconds + self.exposed_seconds


@dataclasses.dataclass(frozen=True)
class Cost:
    """A whole step under an assignment: bytes that its layers hold at once, and seconds on top of
    an ideal step.
    """

    saved_bytes: int
    host_bytes: int
    seconds: float
    recompute_seconds: float
    blocks: tuple[BlockCost, ...]  # aligned with `Profile.blocks`

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(
            f"tag {tag!r} of block {block.name!r} is saved, and what makes its tensor is recomputed"
            " all the same: the"
            " backward reads values between the last product and the tag; tag that product too, or"
            " put the tag inside the"
            " operation's derivative rule, as jaxmem.softmax does"
            for block in self.blocks
            for tag in block.wasted
        )


def evaluate(profile: Profile, actions: Actions) -> Cost:
    """Prices `actions` (block label -> tag -> choice; an absent tag is recomputed) on the profiled
    step.

    A value is demanded if the backward reads it, or if something recomputed does. A demanded tag is
    saved if its choice says so, and demands nothing further; a saved tag that nothing demands costs
    nothing, since partial evaluation drops it. Per run of a layer, forward transfers are hidden by
    `forward_seconds`, those of the backward by
    `backward_seconds` and by what is recomputed.

    Raises TagError if `actions` names a block, tag or choice that the profile lacks, SolverError if
    a demanded value has no origin.
    """
    _check_names(profile, actions)
    link = profile.link_bytes_per_second
    costs = tuple(_block_cost(b, actions.get(b.name, {}), link) for b in profile.blocks)
    return Cost(
        saved_bytes=sum(b.layers * c.device_bytes for b, c in zip(profile.blocks, costs)),
        host_bytes=sum(b.layers * c.host_bytes for b, c in zip(profile.blocks, costs)),
        seconds=sum(b.runs * c.seconds for b, c in zip(profile.blocks, costs)),
        recompute_seconds=sum(b.runs * c.recompute_seconds for b, c in zip(profile.blocks, costs)),
        blocks=costs,
    )


def everything(profile: Profile) -> Cost:
    """Prices the step without any checkpoint: all that the backward reads is kept, nothing is
    recomputed.
    """
    return evaluate(profile, {b.name: {REST: KEEP} for b in profile.blocks})


def effective(profile: Profile, actions: Actions, cost: Cost | None = None) -> Actions:
    """What `actions` amounts to: every tag listed, those that nothing demands as recomputed; REST
    where it is kept.

    `cost` is `evaluate` of the two, for a caller that has it.
    """
    cost, result = cost or evaluate(profile, actions), {}
    for block, paid in zip(profile.blocks, cost.blocks):
        choices = result.setdefault(block.name, {})
        if actions.get(block.name, {}).get(REST) == KEEP:
            choices[REST] = KEEP
            continue
        for tag in block.tags:
            choices.setdefault(tag.name, RECOMPUTE)
        choices |= dict(paid.saved)
    return result


def tag_at(block: BlockClass, equation: Equation) -> Tag | None:
    """The tag that `equation` is, if it is one that has options."""
    if equation.tag is None:
        return None
    ends = (*equation.outputs, *equation.inputs)
    return next((t for t in block.tags if t.name == equation.tag and t.value in ends), None)


def option_of(block: BlockClass, tag: Tag, choice: Choice) -> Option:
    for option in tag.options:
        if option.choice == choice:
            return option
    known = ", ".join(str(o.choice) for o in tag.options) or "none"
    raise TagError(
        f"tag {tag.name!r} of block {block.name!r}: choice `{choice}` has no price;"
        f" expected recompute or one of: {known}; profile the step with that choice"
    )


def keep_seconds_per_byte(block: BlockClass) -> float:
    """What keeping a byte costs in this block: the mean over its tags' keep options and its raw
    inputs.
    """
    kept = [(o.device_bytes, o.seconds) for t in block.tags for o in t.options if o.choice == KEEP]
    kept += [(block.values[v], s) for v, s in zip(block.inputs, block.input_seconds)]
    total = sum(b for b, _ in kept)
    return sum(s for _, s in kept) / total if total else 0.0


def _check_names(profile: Profile, actions: Actions) -> None:
    known: dict[str, set[str]] = {label: {REST} for label in profile.idle_blocks}
    for b in profile.blocks:
        known.setdefault(b.name, {REST}).update(t.name for t in b.tags)
    for label, choices in actions.items():
        if label not in known:
            raise TagError(
                f"`actions` names block {label!r}; the profiled step has {sorted(known)}"
            )
        if missing := sorted(choices.keys() - known[label] - set(profile.idle_tags)):
            raise TagError(
                f"`actions` names tags {missing} of block {label!r}; it has"
                f" {sorted(known[label] - {REST})}"
            )


def _block_cost(block: BlockClass, choices: dict[str, Choice], link: float) -> BlockCost:
    if choices.get(REST) == KEEP:
        return _everything_cost(block)
    free = set(block.free)
    demanded = set(block.needed) - free
    recomputed: list[int] = []
    saved: list[tuple[int, Tag, Option]] = []
    for i in reversed(range(len(block.equations))):
        equation = block.equations[i]
        if demanded.isdisjoint(equation.outputs):
            continue
        tag = tag_at(block, equation)
        choice = RECOMPUTE if tag is None else choices.get(tag.name, RECOMPUTE)
        if tag is not None and choice != RECOMPUTE:
            saved.append((i, tag, option_of(block, tag, choice)))
            continue
        if equation.tag is None:
            recomputed.append(i)
        demanded.update(v for v in equation.inputs if v not in free)
    recomputed.reverse()
    saved.reverse()
    raw = tuple(v for v in block.inputs if v in demanded)
    _check_origins(block, demanded)

    keeping = dict(zip(block.inputs, block.input_seconds))
    host = sum(o.host_bytes for _, _, o in saved)
    recompute_seconds = sum(block.equations[i].seconds for i in recomputed)
    transfer = host / link if host else 0.0
    exposed = max(0.0, transfer - block.forward_seconds)
    exposed += max(0.0, transfer - block.backward_seconds - recompute_seconds)
    return BlockCost(
        name=block.name,
        recomputed=tuple(recomputed),
        saved=tuple((t.name, o.choice) for _, t, o in saved),
        raw_inputs=raw,
        wasted=_wasted(block, recomputed, raw, saved),
        device_bytes=sum(o.device_bytes for _, _, o in saved) + sum(block.values[v] for v in raw),
        host_bytes=host,
        recompute_seconds=recompute_seconds,
        keep_seconds=sum(o.seconds for _, _, o in saved) + sum(keeping.get(v, 0.0) for v in raw),
        exposed_seconds=exposed,
        matmuls=sum(block.equations[i].matmuls for i in recomputed),
        flops=sum(block.equations[i].flops for i in recomputed),
    )


def _everything_cost(block: BlockClass) -> BlockCost:
    size = block.everything_bytes
    raw = tuple(v for v in block.inputs if v in set(block.needed) - set(block.free))
    keeping = size * keep_seconds_per_byte(block)
    return BlockCost(block.name, (), (), raw, (), size, 0, 0.0, keeping, 0.0, 0, 0.0)


def _wasted(block: BlockClass, recomputed, raw, saved) -> tuple[str, ...]:
    """Saved tags of which the tensor, or a matrix product between it and the tags before it, is
    recomputed all the same.
    """
    made_by = {o: i for i, e in enumerate(block.equations) for o in e.outputs}
    again, needed = set(recomputed), set(block.needed)
    names = []
    for i, tag, _ in saved:
        lead, todo = set(), list(block.equations[i].inputs)
        if any(v in raw or made_by.get(v) in again for v in todo):
            names.append(tag.name)
            continue
        while todo:
            e = made_by.get(todo.pop())
            if e is not None and e not in lead and block.equations[e].tag is None:
                lead.add(e)
                todo += block.equations[e].inputs
        products = [block.equations[e] for e in lead & again if block.equations[e].matmuls]
        # else the backward reads the product itself
        if any(needed.isdisjoint(e.outputs) for e in products):
            names.append(tag.name)
    return tuple(names)


def _check_origins(block: BlockClass, demanded: set[int]) -> None:
    made = {o for e in block.equations for o in e.outputs} | set(block.inputs)
    if lost := sorted(demanded - made):
        raise SolverError(
            f"block {block.name!r}: value {lost[0]} is demanded, and no equation makes it, nor is"
            " it among `inputs` or"
            " `free`; the profile's graph is incomplete"
        )
