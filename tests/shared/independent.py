"""A profile of a layer whose tensors are made of its input, each by an operation of its own."""

from jaxmem._core.profile import Profile
from tests.shared.profiles import block, profile


def independent(tags: dict, first: int = 0) -> Profile:
    """`tags`: by name, the seconds of the operation, the bytes of the tensor, and its options.
    first: the bytes of the layer's input.
    """
    equations, sizes, options = [], [first], {}
    for name, (seconds, size, options[name]) in tags.items():
        made = len(sizes)
        sizes += [size, size]
        equations += [([0], [made], seconds, None), ([made], [made + 1], 0.0, name)]
    return profile(block(equations, range(2, len(sizes), 2), sizes, options))
