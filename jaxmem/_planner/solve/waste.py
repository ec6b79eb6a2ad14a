"""Finds tags that are saved in vain, and tags between which matrix products are recomputed although
the tags are saved.
"""

from collections.abc import Iterator

from jaxmem._core.actions import RECOMPUTE, Actions
from jaxmem._core.groups import is_auto
from jaxmem._core.lists import reached
from jaxmem._core.profile import BlockClass, Equation, Profile
from jaxmem._planner.solve.cost import BlockCost, evaluate, option_of


def warnings(profile: Profile, actions: Actions) -> tuple[str, ...]:
    """Sentences for the user about tags that are saved in vain under `actions`, and about products
    that are recomputed although the tag after them is saved. Tags that `jaxmem.auto` chose are left
    out: the solver saves no tag in vain, and the user cannot move these tags.
    """
    in_vain = wasted(profile, actions)
    vain = [
        f"tag {tag!r} of block {label!r} is saved, and what makes its tensor is recomputed all the"
        " same, so that saving it spares no matrix product: the backward reads values between the"
        " last product and the tag; tag that product too, or put the tag inside the operation's"
        " derivative rule, as jaxmem.ops.softmax does"
        for label, tag in in_vain
        if not is_auto(label)
    ]
    others = [
        f"{count} matrix product{'s' if count > 1 else ''} before tag {tag!r} of block {label!r}"
        f" {'are' if count > 1 else 'is'} recomputed even where every tag is kept: the backward"
        " reads a value that is made of"
        f" {'them' if count > 1 else 'it'} and that no tag names; tag that value"
        for (label, tag), count in gaps(profile, actions).items()
        if (label, tag) not in in_vain and not is_auto(label)
    ]
    return (*vain, *others)


def wasted(profile: Profile, actions: Actions) -> tuple[tuple[str, str], ...]:
    """The (block label, tag) pairs that are saved under `actions`, and that spare no recomputation
    worth a tag.

    The equations that the backward repeats with the tag saved are compared with the equations that
    it repeats without. A tag that spares a matrix product is worth saving, whatever other products
    are repeated: a tag after an attention without tags spares the attention's last product, though
    the attention's other products are repeated for its derivative. If block classes share a label,
    a tag is wasted only if every class that saves the tag wastes it.

    Raises TagError as `evaluate` does.
    """
    # By (label, tag), whether each class that saves the tag wastes it. A dict keeps the order.
    wasted_by_class: dict[tuple[str, str], list[bool]] = {}
    for i, block, tag, paid in _saved(profile, actions):
        without = actions | {block.name: actions[block.name] | {tag: RECOMPUTE}}
        other = evaluate(profile, without).blocks[i]
        is_wasted = _spares_nothing(block, tag, paid, other)
        wasted_by_class.setdefault((block.name, tag), []).append(is_wasted)
    return tuple(key for key, is_wasted in wasted_by_class.items() if all(is_wasted))


def gaps(profile: Profile, actions: Actions) -> dict[tuple[str, str], int]:
    """(block label, tag) -> the number of matrix products between the tags before it and the tag
    that are repeated although the tag is saved. A product that the backward reads itself does not
    count: the product is repeated for the backward, wherever the tag is.
    """
    counts: dict[tuple[str, str], int] = {}
    for _, block, tag, paid in _saved(profile, actions):
        if count := sum(e.matmuls for e in _repeated(block, _lead(block, tag), paid)):
            counts[block.name, tag] = max(count, counts.get((block.name, tag), 0))
    return counts


def _saved(profile: Profile, actions: Actions) -> Iterator[tuple[int, BlockClass, str, BlockCost]]:
    """Every saved tag of every block class, with the class's index and price."""
    for i, (block, paid) in enumerate(zip(profile.blocks, evaluate(profile, actions).blocks)):
        for tag in dict(paid.saved):
            yield i, block, tag, paid


def _spares_nothing(block: BlockClass, tag: str, saved: BlockCost, without: BlockCost) -> bool:
    """Whether saving the tag spares no matrix product, and no time worth a tag.

    saved, without: the block's price with the tag saved, and with it recomputed.
    """
    kept = {name for name, _ in saved.saved}
    if saved.raw_inputs != without.raw_inputs or not kept.issuperset(dict(without.saved)):
        return False  # the tag replaces an input or another tag, which need not be saved then
    if saved.recomputed == without.recomputed:
        return True
    # The lead of a tag at the wrong operation has a product that is repeated for another value.
    # Such a tag is wasted if it spares no other product, and if it spares less time than its tensor
    # takes to keep, or less than half of the time that its tensor takes to compute.
    lead = _lead(block, tag)
    computing = sum(block.equations[i].seconds for i in lead)
    choice = dict(saved.saved)[tag]
    keeping = sum(option_of(block, one, choice).seconds for one in block.occurrences(tag))
    spared = without.recompute_seconds - saved.recompute_seconds
    spares_little = saved.matmuls == without.matmuls and spared <= max(keeping, computing / 2)
    return spares_little and bool(_repeated(block, lead, saved))


def _lead(block: BlockClass, tag: str) -> set[int]:
    """Indices of the equations between the tags before `tag` and `tag`."""
    equations = block.equations
    made_by = {o: i for i, e in enumerate(equations) if e.tag is None for o in e.outputs}
    makers = lambda e: [made_by[v] for v in e.inputs if v in made_by]
    last = [i for e in equations if e.tag == tag for i in makers(e)]
    return reached(last, lambda i: makers(equations[i]))


def _repeated(block: BlockClass, lead: set[int], cost: BlockCost) -> list[Equation]:
    """The equations with matrix products in a tag's `lead` that the backward repeats for values
    that are computed from the products.
    """
    needed = set(block.needed)
    again = [block.equations[i] for i in sorted(lead & set(cost.recomputed))]
    return [e for e in again if e.matmuls and needed.isdisjoint(e.outputs)]
