"""Tells which tags are saved in vain, and between which tags products are repeated all the same."""

from collections.abc import Iterator

from jaxmem._core.actions import RECOMPUTE, Actions
from jaxmem._core.groups import is_auto
from jaxmem._core.profile import BlockClass, Equation, Profile
from jaxmem._planner.solve.cost import BlockCost, evaluate, option_of


def warnings(profile: Profile, actions: Actions) -> tuple[str, ...]:
    """Sentences for the user about tags that are saved in vain under `actions`, and about products
    that are repeated although the tag after them is saved. Tags that `jaxmem.auto` chose are left
    out: the solver does not save what spares nothing, and the user can move none of them.
    """
    in_vain = wasted(profile, actions)
    vain = [
        f"tag {tag!r} of block {label!r} is saved, and what makes its tensor is recomputed all the"
        " same, so that saving it spares no matrix product: the backward reads values between the"
        " last product and the tag; tag that product too, or put the tag inside the operation's"
        " derivative rule, as jaxmem.softmax does"
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
    """The (block label, tag) pairs that are saved under `actions` and spare nothing worth a tag.

    What the backward repeats is compared with and without the tag saved. A tag that spares a matrix
    product is worth saving, whatever else is repeated: one after an attention without tags spares
    the attention's last product, though the others are repeated for its derivative. Where blocks
    of several classes share a label, a tag is wasted only if every class that saves it wastes it.

    Raises TagError as `evaluate`.
    """
    # By place, whether each class that saves the tag wastes it. A dict keeps the order.
    found: dict[tuple[str, str], list[bool]] = {}
    for i, block, tag, paid in _saved(profile, actions):
        without = actions | {block.name: actions[block.name] | {tag: RECOMPUTE}}
        other = evaluate(profile, without).blocks[i]
        verdict = _spares_nothing(block, tag, paid, other)
        found.setdefault((block.name, tag), []).append(verdict)
    return tuple(place for place, verdicts in found.items() if all(verdicts))


def gaps(profile: Profile, actions: Actions) -> dict[tuple[str, str], int]:
    """(block label, tag) -> how many matrix products that lead to the tag from the tags before it
    are repeated although the tag is saved. A product that the backward reads itself does not count:
    it is repeated for that reader, wherever the tag stands.
    """
    found: dict[tuple[str, str], int] = {}
    for _, block, tag, paid in _saved(profile, actions):
        if count := sum(e.matmuls for e in _repeated(block, _lead(block, tag), paid)):
            found[block.name, tag] = max(count, found.get((block.name, tag), 0))
    return found


def _saved(profile: Profile, actions: Actions) -> Iterator[tuple[int, BlockClass, str, BlockCost]]:
    """Every saved tag of every class, with the class's index and its price."""
    for i, (block, paid) in enumerate(zip(profile.blocks, evaluate(profile, actions).blocks)):
        for tag in dict(paid.saved):
            yield i, block, tag, paid


def _spares_nothing(block: BlockClass, tag: str, saved: BlockCost, without: BlockCost) -> bool:
    """Whether saving the tag spares no product, and no time worth a tag.

    saved, without: the block's price with the tag saved, and with it recomputed.
    """
    kept = {name for name, _ in saved.saved}
    if saved.raw_inputs != without.raw_inputs or not kept.issuperset(dict(without.saved)):
        return False  # it stands for an input, or another tag, which need not be saved then
    if saved.recomputed == without.recomputed:
        return True
    # The lead of a tag in the wrong place holds a product that is repeated for another value. That
    # is a waste where the tag spares no other product, and less time than keeping it takes, or than
    # half of what making it does.
    lead = _lead(block, tag)
    making = sum(block.equations[i].seconds for i in lead)
    choice = dict(saved.saved)[tag]
    keeping = sum(option_of(block, place, choice).seconds for place in block.places(tag))
    spared = without.recompute_seconds - saved.recompute_seconds
    cheap = saved.matmuls == without.matmuls and spared <= max(keeping, making / 2)
    return cheap and bool(_repeated(block, lead, saved))


def _lead(block: BlockClass, tag: str) -> set[int]:
    """Indices of the equations between the tags before `tag` and itself."""
    made_by = {o: i for i, e in enumerate(block.equations) for o in e.outputs}
    found: set[int] = set()
    todo = [v for e in block.equations if e.tag == tag for v in e.inputs]
    while todo:
        e = made_by.get(todo.pop())
        if e is not None and e not in found and block.equations[e].tag is None:
            found.add(e)
            todo += block.equations[e].inputs
    return found


def _repeated(block: BlockClass, lead: set[int], cost: BlockCost) -> list[Equation]:
    """The equations with products in a tag's `lead` that are repeated for what is made of them."""
    needed = set(block.needed)
    again = [block.equations[i] for i in sorted(lead & set(cost.recomputed))]
    return [e for e in again if e.matmuls and needed.isdisjoint(e.outputs)]
