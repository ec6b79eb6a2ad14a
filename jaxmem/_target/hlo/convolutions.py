"""Counts the FLOPs of convolutions as the TPU compiler writes matrix products: batch dimensions are
dilated windows there, of which a result reads one place each.
"""

import functools
import math
import re

from jaxmem._target.hlo.text import Instruction

_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def convolution_flops(i: Instruction) -> int | None:
    """Returns twice the products of numbers that a convolution adds up, padding left out, or None
    if its text does not tell.
    """
    if len(i.operands) < 2 or not (labels := _LABELS.search(i.text)):
        return None
    image, kernel, made = (dict(zip(labels[k], a.shape)) for k, a in
                           zip((1, 2, 3), (*i.operands[:2], i.output)))  # fmt: skip
    if not {"b", "f"} <= made.keys() or "i" not in kernel:
        return None
    window = _window(i.text)
    spatial = sorted(k for k in made if k not in "bf")
    pairs = 1
    for n, axis in enumerate(spatial):
        each = {name: values[n] for name, values in window.items() if n < len(values)}
        low = int(str(each.get("pad", "0")).split("_")[0])
        pairs *= _pairs(
            image[axis],
            kernel[axis],
            made[axis],
            int(each.get("stride", 1)),
            low,
            int(each.get("lhs_dilate", 1)),
            int(each.get("rhs_dilate", 1)),
        )
    return 2 * made["b"] * made["f"] * kernel["i"] * pairs


def _window(text: str) -> dict[str, list[str]]:
    found = _WINDOW.search(text)
    parts = found[1].split() if found else []
    return {name: values.split("x") for name, values in (p.split("=") for p in parts)}


@functools.cache
def _pairs(
    image: int, kernel: int, made: int, stride: int, low: int, dilated: int, spread: int
) -> int:
    """How many pairs of a result's place and a kernel's place along one axis read the image."""
    count = 0
    for k in range(kernel):
        # Places o with 0 <= o * stride + k * spread - low <= (image - 1) * dilated, of which those
        # count that dilation left a number at.
        at = k * spread - low
        first = max(0, -(at // stride)) if at < 0 else 0
        last = min(made - 1, ((image - 1) * dilated - at) // stride)
        step = dilated // math.gcd(stride, dilated)
        count += sum(
            1
            for o in range(first, min(last, first + step - 1) + 1)
            if (o * stride + at) % dilated == 0
            for _ in range((last - o) // step + 1)
        )
    return count
