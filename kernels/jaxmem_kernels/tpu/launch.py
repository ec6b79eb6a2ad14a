"""Launches TPU kernels. Each public function is the `launch` of the operation with the function's
name. The arguments are the arrays and the parameters of the operation; the results are a tuple of
the reference's results.

interpret: whether JAX interprets the kernel on the local device, as tests do.
rounding: `stochastic`, and for stochastic rounding the `seed`.

Tensors that kernels read are not pinned to the device's memory. XLA copies a tensor into VMEM
before the kernel reads it, if no other copy is more useful. Pinning would save this copy for an
isolated encoding. But a tensor that a product has left in VMEM would be written to the device's
memory for the kernel, and read twice.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxmem_kernels.tpu import bits, blocks, decode, encode
from jaxmem_kernels.tpu.blocks import Argument, Blocks


def quantize(x, *, group, scale, interpret=False, **rounding):
    b = blocks.of(x.shape, group, 2)
    kernel = functools.partial(encode.encode, scale=scale, **rounding)
    results = b.codes(), b.scales(scale)
    codes, scales = _run(kernel, b, (b.values(x),), results, interpret, kept=1)
    return b.as_codes(codes), b.as_scales(scales)


def quantize_without(x, taken, *, group, scale, interpret=False, **rounding):
    b = blocks.of(x.shape, group, 2)
    kernel = functools.partial(encode.encode_without, scale=scale, **rounding)
    arrays = b.values(x), b.row(taken.astype(jnp.int32))
    results = b.codes(), b.scales(scale)
    codes, scales = _run(kernel, b, arrays, results, interpret, kept=1)
    return b.as_codes(codes), b.as_scales(scales)


def quantize_separated(x, index, *, group, scale, interpret=False, **rounding):
    b = blocks.of(x.shape, group, 2)
    kernel = functools.partial(encode.encode_separated, scale=scale, **rounding)
    slots = index.size
    results = b.codes(), b.scales(scale), b.slots(jax.ShapeDtypeStruct((slots,), x.dtype))
    room = [pltpu.VMEM((rows, 128), jnp.float32) for rows in (b.tiles.columns, slots)]
    codes, scales, values = _run(
        kernel,
        b,
        (b.values(x),),
        results,
        interpret,
        kept=1,
        scalars=(index.astype(jnp.int32),),
        scratch=room,
        in_turn=True,
    )
    return b.as_codes(codes), b.as_scales(scales), b.as_slots(values)


def quantize_channelwise(x, *, group, scale, interpret=False, **rounding):
    b = blocks.of_channels(x.shape, group, 2, x.dtype.itemsize)
    how = {"known": b.tokens, "scale": scale}
    kernel = functools.partial(encode.encode_channelwise, **how, **rounding)
    results = b.codes(), b.row(jax.ShapeDtypeStruct((b.width,), jnp.float32))
    room = (pltpu.VMEM(b.tiles.row_shape, jnp.float32),)
    codes, scales = _run(kernel, b, (b.values(x),), results, interpret, scratch=room)
    return b.as_codes(codes), scales.reshape(-1).astype(scale)


def quantize_offset(x, *, group, scale, interpret=False, **rounding):
    b = blocks.of(x.shape, group, 2)
    kernel = functools.partial(encode.encode_offset, scale=scale, **rounding)
    results = b.codes(), b.scales(scale), b.scales(scale)
    codes, scales, offsets = _run(kernel, b, (b.values(x),), results, interpret, kept=2)
    return b.as_codes(codes), b.as_scales(scales), b.as_scales(offsets)


def quantize_by(x, scales, *, group, interpret=False, **rounding):
    b = blocks.of(x.shape, group, 2)
    kernel = functools.partial(encode.encode_by, **rounding)
    arrays = b.values(x), b.row(scales.astype(jnp.float32))
    (codes,) = _run(kernel, b, arrays, (b.codes(),), interpret)
    return (b.as_codes(codes),)


def dequantize(codes, scales, *, width, dtype, interpret=False):
    b = _of_codes(codes, width, 2)
    return _decoded(decode.decode, b, (b.codes(codes), b.scales(scales)), dtype, interpret)


def dequantize_offset(codes, scales, offsets, *, width, dtype, interpret=False):
    b = _of_codes(codes, width, 2)
    arrays = b.codes(codes), b.scales(scales), b.scales(offsets)
    return _decoded(decode.decode_offset, b, arrays, dtype, interpret)


def dequantize_with(codes, scales, values, slots, *, width, dtype, interpret=False):
    b = _of_codes(codes, width, 2)
    # The channel of each slot. Since slots are few, each slot is compared with all channels.
    room = jnp.arange(values.shape[-1], dtype=slots.dtype)[:, None]
    channel = jnp.arange(slots.size, dtype=jnp.int32)
    channels = jnp.where(slots == room, channel, -1).max(1).astype(jnp.int32)
    arrays = b.codes(codes), b.scales(scales), b.slots(values)
    kernel, room = decode.decode_with, pltpu.VMEM((b.tiles.columns, 128), jnp.float32)
    return _decoded(kernel, b, arrays, dtype, interpret, scalars=(channels,), scratch=(room,))


def dequantize_by(codes, scales, *, width, dtype, interpret=False):
    b = _of_codes(codes, width, 2)
    arrays = b.codes(codes), b.row(scales.astype(jnp.float32))
    return _decoded(decode.decode_by, b, arrays, dtype, interpret)


def pack_bits(x, zero, *, group, interpret=False):
    b = blocks.of(x.shape, group, 8)
    # A TPU's kernels read no bools. XLA fuses the comparison with the operation that computes `x`.
    values = b.values((x != zero).astype(jnp.int8))
    (codes,) = _run(bits.pack, b, (values,), (b.codes(),), interpret)
    return (b.as_codes(codes),)


def unpack_bits(codes, zero, one, *, width, interpret=False):
    b = _of_codes(codes, width, 8)
    (x,) = _run(bits.unpack, b, (b.codes(codes),), (b.decoded("int8"),), interpret)
    # XLA fuses the choice between the two values with the operations that use it.
    return (jnp.where(b.as_values(x) != 0, one, zero),)


def _of_codes(codes, width: int, parts: int) -> Blocks:
    return blocks.of((*codes.shape[:-2], width), parts * codes.shape[-1], parts)


def _decoded(kernel, b: Blocks, arrays, dtype: str, interpret: bool, **how):
    kernel = functools.partial(kernel, limit=float(jnp.finfo(dtype).max))
    (x,) = _run(kernel, b, arrays, (b.decoded(dtype),), interpret, **how)
    return (b.as_values(x),)


def _run(
    kernel,
    b: Blocks,
    arrays: tuple[Argument, ...],
    results: tuple[Argument, ...],
    interpret: bool,
    *,
    kept: int = 0,
    scalars: tuple = (),
    scratch: Sequence = (),
    in_turn: bool = False,
) -> tuple:
    """Runs a kernel on the blocks of `arrays`, and returns `results`.

    kept: number of arrays of scales that a program keeps in scratch memory.
    scalars: arrays that programs read from scalar memory, before `arrays`.
    scratch: the other scratch memory of a program.
    in_turn: whether a block of a result has all columns, so that the blocks of columns run one
      after the other.
    """
    name = getattr(kernel, "func", kernel).__name__  # a partial function has no name
    groups = b.tiles.columns // b.tiles.group
    keep = (pltpu.VMEM((groups, 128), jnp.float32),) * kept
    moved = sum(a.array.size * jnp.dtype(a.array.dtype).itemsize for a in (*arrays, *results))
    x = arrays[0].array
    order = ("parallel", "parallel", "arbitrary" if in_turn else "parallel")
    call = pl.pallas_call(
        functools.partial(kernel, tiles=b.tiles),
        out_shape=[_varying(result.array, x) for result in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=b.grid,
            in_specs=[array.block for array in arrays],
            out_specs=[result.block for result in results],
            scratch_shapes=[*keep, *scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name=f"jaxmem_{name}",
    )
    return tuple(call(*scalars, *(array.array for array in arrays)))


def _varying(result: jax.ShapeDtypeStruct, x) -> jax.ShapeDtypeStruct:
    """Returns `result` with the varying type of `x` in `shard_map`."""
    return result.update(manual_axis_type=getattr(jax.typeof(x), "manual_axis_type", None))
