"""Defines the operations that codecs call: the reference and the kernel of each operation, the
arrays that the kernel takes, and the rule by which devices divide the arrays.

Names of axes in rules: a0, a1, … are the leading axes, k the groups of a row, h the bytes of a
group, s the slots of exact channels. `GROUPED` is a row's axis of values, k groups of g.
"""

from jaxmem_kernels import bits, int4
from jaxmem_kernels.dispatch import Kernel, operation
from jaxmem_kernels.gpu import choice, launch
from jaxmem_kernels.partition import GROUPED, Axes, Rule


def _encoding(scales: int, channels: bool = False):
    """Makes the rule of an encoder.

    scales: number of arrays of scales or offsets that it returns in addition to the codes.
    channels: whether it takes an array with an entry for each value of a row, in addition to `x`.
    """

    def rule(x, *_, group: int, **__) -> Rule:
        # `* channels` leaves the operand out where the flag is False.
        lead, operands = _lead(x.ndim - 1), ((GROUPED,),) * channels
        results = ((*lead, "k", "h"), *((*lead, "k"),) * scales)
        return _rule(((*lead, GROUPED), *operands), results, x.shape[-1], group)

    return rule


def _decoding(*others: Axes):
    """Makes the rule of a decoder of codes and other arrays. `others` has the last axes of each
    array. Arrays of channels (`GROUPED`) have only these axes; other arrays have the leading axes
    too.
    """

    def rule(codes, *_, width: int, dtype: str) -> Rule:
        lead = _lead(codes.ndim - 2)
        rows = (axes if axes == (GROUPED,) else (*lead, *axes) for axes in others)
        return _rule(((*lead, "k", "h"), *rows), ((*lead, GROUPED),), width, 2 * codes.shape[-1])

    return rule


def _packing(x, _, *, group: int) -> Rule:
    lead = _lead(x.ndim - 1)
    return _rule(((*lead, GROUPED), ()), ((*lead, "k", "h"),), x.shape[-1], group)


def _unpacking(packed, *_, width: int) -> Rule:
    lead = _lead(packed.ndim - 2)
    return _rule(((*lead, "k", "h"), (), ()), ((*lead, GROUPED),), width, 8 * packed.shape[-1])


def _rule(operands: tuple[Axes, ...], results: tuple[Axes, ...], width: int, group: int) -> Rule:
    """Returns the rule for rows of `width` values in groups of `group`. Bytes of one group, slots,
    and rows whose last group is short are never divided.
    """
    named = {name for axes in (*operands, *results) for name in axes}
    rule = Rule(operands, results, frozenset({"h", "s"} & named), width // group, group)
    return rule.with_whole_rows() if width % group else rule


def _lead(rank: int) -> Axes:
    return tuple(f"a{i}" for i in range(rank))


# Each operation: the reference, then the kernel's launch, the function `takes`, and the rule.
# `shared` are the operands without leading axes: scales, marks and slots of channels, and scalars.
quantize = operation(int4.quantize, Kernel(launch.quantize, choice.encodes, _encoding(1)))
quantize_offset = operation(
    int4.quantize_offset, Kernel(launch.quantize_offset, choice.encodes, _encoding(2))
)
quantize_without = operation(
    int4.quantize_without,
    Kernel(launch.quantize_without, choice.encodes_by, _encoding(1, channels=True), shared=(1,)),
)
quantize_by = operation(
    int4.quantize_by,
    Kernel(launch.quantize_by, choice.encodes_by, _encoding(0, channels=True), shared=(1,)),
)
dequantize = operation(
    int4.dequantize, Kernel(launch.dequantize, choice.decodes, _decoding(("k",)))
)
dequantize_offset = operation(
    int4.dequantize_offset,
    Kernel(launch.dequantize_offset, choice.decodes, _decoding(("k",), ("k",))),
)
dequantize_with = operation(
    int4.dequantize_with,
    Kernel(
        launch.dequantize_with,
        choice.decodes_with,
        _decoding(("k",), ("s",), (GROUPED,)),
        shared=(3,),
    ),
)
dequantize_by = operation(
    int4.dequantize_by,
    Kernel(launch.dequantize_by, choice.decodes_by, _decoding((GROUPED,)), shared=(1,)),
)
# GPUs run the references of masks (`choice.never`). TPUs divide their kernels by these rules.
pack_bits = operation(bits.pack_bits, Kernel(None, choice.never, _packing, shared=(1,)))
unpack_bits = operation(bits.unpack_bits, Kernel(None, choice.never, _unpacking, shared=(1, 2)))
