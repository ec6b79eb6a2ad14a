"""The operations that codecs are made of: each its reference, the kernel, what that takes, and how its arrays are divided."""

from jaxmem_kernels import bits, choice, int4, launch
from jaxmem_kernels.dispatch import Kernel, operation
from jaxmem_kernels.partition import GROUPED, Axes, Rule


def _encoding(scales: int, channels: bool = False):
    """The rule of an encoder: codes and sets of scales of rows of groups; of a flat tensor whose last group is short."""

    def rule(x, *_, group: int, **__) -> Rule:
        lead = _lead(x.ndim - 1)
        if x.shape[-1] % group:
            return Rule((("n",),), (("k", "h"), *[("k",)] * scales), ("n", "k", "h"), group)
        operands = ((*lead, GROUPED), *[(GROUPED,)] * channels)
        return Rule(operands, ((*lead, "k", "h"), *[(*lead, "k")] * scales), ("h",), group)

    return rule


def _decoding(*others: Axes):
    """The rule of a decoder of codes and `others`, given by their last axes; those that begin with "k" follow the rows."""

    def rule(codes, *_, width: int, dtype: str) -> Rule:
        lead, group = _lead(codes.ndim - 2), 2 * codes.shape[-1]
        if width % group:
            return Rule((("k", "h"), *others), (("n",),), ("n", "k", "h"), group)
        rows = tuple(axes if axes == (GROUPED,) else (*lead, *axes) for axes in others)
        whole = tuple(name for axes in others for name in axes if name == "s")
        return Rule(((*lead, "k", "h"), *rows), ((*lead, GROUPED),), ("h", *whole), group)

    return rule


def _packing(x, _, *, group: int) -> Rule:
    lead = _lead(x.ndim - 1)
    if x.shape[-1] % group:
        return Rule((("n",), ()), (("k", "h"),), ("n", "k", "h"), group)
    return Rule(((*lead, GROUPED), ()), ((*lead, "k", "h"),), ("h",), group)


def _unpacking(packed, *_, width: int) -> Rule:
    lead, group = _lead(packed.ndim - 2), 8 * packed.shape[-1]
    if width % group:
        return Rule((("k", "h"), (), ()), (("n",),), ("n", "k", "h"), group)
    return Rule(((*lead, "k", "h"), (), ()), ((*lead, GROUPED),), ("h",), group)


def _lead(rank: int) -> Axes:
    return tuple(f"a{i}" for i in range(rank))


quantize = operation(int4.quantize, Kernel(launch.quantize, choice.encodes, _encoding(1)))
quantize_offset = operation(int4.quantize_offset, Kernel(launch.quantize_offset, choice.encodes, _encoding(2)))
quantize_without = operation(
    int4.quantize_without, Kernel(launch.quantize_without, choice.encodes_by, _encoding(1, channels=True), shared=(1,))
)
quantize_by = operation(
    int4.quantize_by, Kernel(launch.quantize_by, choice.encodes_by, _encoding(0, channels=True), shared=(1,))
)
dequantize = operation(int4.dequantize, Kernel(launch.dequantize, choice.decodes, _decoding(("k",))))
dequantize_offset = operation(
    int4.dequantize_offset, Kernel(launch.dequantize_offset, choice.decodes, _decoding(("k",), ("k",)))
)
dequantize_with = operation(
    int4.dequantize_with,
    Kernel(launch.dequantize_with, choice.decodes_with, _decoding(("k",), ("s",), (GROUPED,)), shared=(3,)),
)
dequantize_by = operation(
    int4.dequantize_by, Kernel(launch.dequantize_by, choice.decodes_by, _decoding((GROUPED,)), shared=(1,))
)
pack_bits = operation(bits.pack_bits, Kernel(launch.pack_bits, choice.packs, _packing, shared=(1,)))
unpack_bits = operation(bits.unpack_bits, Kernel(launch.unpack_bits, choice.never, _unpacking, shared=(1, 2)))
