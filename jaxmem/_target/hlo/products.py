"""Tells the FLOPs of matrix products and convolutions in an optimized HLO module, and their time
where XLA has none.
"""

import functools
import math
import re

from jaxmem._target.devices.rates import Rates
from jaxmem._target.hlo.text import Instruction

# As a dot's attribute, or as JSON in the configuration of a library call.
_CONTRACTING = re.compile(r'lhs_contracting_dim(?:s=|ensions":)[{\[]([\d,"]*)[}\]]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")  # b01f_01io->b01f: the kernel's, here 01io
_ALL_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_MATMUL_CALLS = ("__cublas$", "__onednn$matmul")
# What a product reaches on a GPU of the memory's rate, and seconds of its own. Fitted to XLA's
# table of products that were measured on an H100 (benchmarks/estimates.py).
_OF_BANDWIDTH, _LAUNCH = 0.9, 6e-6


def flops_of(i: Instruction) -> int | None:
    """Returns the FLOPs of a matrix product, or None for an instruction that is none."""
    target = m[1] if (m := _TARGET.search(i.text)) else ""
    if i.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution_flops(i, target)
    if i.opcode != "dot" and not (i.opcode == "custom-call" and target.startswith(_MATMUL_CALLS)):
        return None
    if m := _CONTRACTING.search(i.text):
        dims = [int(d) for d in re.findall(r"\d+", m[1])]
        return 2 * math.prod(i.output.shape) * math.prod(i.operands[0].shape[d] for d in dims)
    # The text of other library calls does not name the contracted dimensions. For [b,m,k] x [b,k,n]
    # the sizes of the three arrays multiply to (b m k)(b k n)(b m n) = b (b m k n)².
    batch = math.prod(i.output.shape[:-2])
    return 2 * math.isqrt(
        math.prod(math.prod(a.shape) for a in (*i.operands[:2], i.output)) // max(batch, 1)
    )


def _convolution_flops(i: Instruction, target: str) -> int | None:
    """Returns 2 · outputs · kernel elements per output feature, for the forward convolution and for
    the two of its gradient alike.
    """
    if len(i.operands) < 2 or not (labels := _LABELS.search(i.text)):
        return None
    # `image` is the forward convolution's result. A gradient with respect to the input reads its
    # cotangent, and so does one with respect to the filter, whose result is of the kernel's shape.
    image, kernel = i.output.shape, i.operands[1].shape
    if "BackwardInput" in target:
        image = i.operands[0].shape
    elif "BackwardFilter" in target:
        image, kernel = i.operands[1].shape, i.output.shape
    return 2 * math.prod(image) * math.prod(kernel) // kernel[labels[1].index("o")]


def is_mispriced(i: Instruction) -> bool:
    """Whether XLA's estimate of a library's product is known to be wrong. Its table has no float16
    product and no bfloat16 one with a float32 result (its estimates are 8 and 64 times too slow),
    and cuDNN's convolutions are free by it.
    """
    if "__cudnn$conv" in i.text:
        return True
    dtypes = (i.operands[0].dtype, i.output.dtype)
    return i.opcode == "custom-call" and dtypes[0] in ("bf16", "f16") and dtypes != ("bf16", "bf16")


def arithmetic_seconds(i: Instruction, flops: int, rates: Rates) -> float:
    """Seconds of a product by its arithmetic alone."""
    return flops / (rates.flops_f32 if i.operands[0].dtype in ("f32", "f64") else rates.flops_16bit)


def product_seconds(arithmetic: float, nbytes: int, rates: Rates) -> float:
    """Seconds of a kernel of products, by its arithmetic or by its memory traffic, whichever takes
    longer.

    arithmetic: seconds of its products, by `arithmetic_seconds`.
    nbytes: bytes that it reads and writes.
    """
    return _LAUNCH + max(arithmetic, nbytes / (_OF_BANDWIDTH * rates.bandwidth))


def dilated_flops(i: Instruction) -> int | None:
    """Returns twice the number of multiplications of a convolution, without padding, or None if its
    text does not show them. The TPU compiler writes matrix products as such convolutions: batch
    dimensions are dilated windows, and each result reads one position of a window.
    """
    if len(i.operands) < 2 or not (labels := _ALL_LABELS.search(i.text)):
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
    """The attributes of a convolution's window by name, with a value for each dimension."""
    found = _WINDOW.search(text)
    parts = found[1].split() if found else []
    return {name: values.split("x") for name, values in (p.split("=") for p in parts)}


@functools.cache
def _pairs(
    image: int, kernel: int, made: int, stride: int, low: int, dilated: int, spread: int
) -> int:
    """How many pairs of a result's and a kernel's positions along one axis read the image."""
    count = 0
    for k in range(kernel):
        # Positions o with 0 <= o * stride + k * spread - low <= (image - 1) * dilated. A position
        # counts if dilation left a number there.
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
