"""The policies that one would try by hand before anything is planned."""

from jaxmem._core.actions import KEEP, Actions
from jaxmem._core.profile import BlockClass, Profile
from jaxmem._planner.search import candidates
from jaxmem._planner.solve.cost import tag_at


def hand_policies(profile: Profile) -> dict[str, Actions]:
    """The policies that one would try first, as assignments by name: JAX's `nothing_saveable`, its
    `dots_saveable` as far as there are tags, and all names.
    """
    of_each = {
        "nothing kept": lambda block: [],
        "products kept": _products,
        "every tag kept": lambda block: [tag.name for tag in block.tags],
    }
    found: dict[str, Actions] = {}
    for name, tags_of in of_each.items():
        # Classes of one label share their decisions: a tag is kept if any of them would keep it.
        actions = found.setdefault(name, {block.name: {} for block in profile.blocks})
        for block in profile.blocks:
            actions[block.name] |= dict.fromkeys(tags_of(block), KEEP)
    return {n: a for n, a in found.items() if candidates.price_of(profile, a) is not None}


def _products(block: BlockClass) -> list[str]:
    """The tags whose tensor is the result of a matrix product, or what a bias, a cast or a view
    makes of one.
    """
    made = {v: equation for equation in block.equations for v in equation.outputs}
    found = []
    for equation in block.equations:
        if (tag := tag_at(block, equation)) is None:
            continue
        maker = made.get(equation.inputs[0])
        while maker is not None and not maker.matmuls:
            own = [v for v in maker.inputs if v in made]
            maker = made[own[0]] if len(own) == 1 else None
        if maker is not None:
            found.append(tag.name)
    return found
