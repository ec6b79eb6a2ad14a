"""TPU kernels without a TPU: in Pallas's interpreter, each kernel equals its reference bitwise."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem_kernels as jk
from jaxmem_kernels import bits, int4
from jaxmem_kernels.tpu import blocks, launch
from tests.kernels.values import channel_scales, equal, hard

# The group of each shape. The shapes have: several blocks of columns; a part of a tile of tokens;
# narrow rows, as of heads, which are stored transposed; two batch axes; wide groups; narrow groups;
# rows of which no 128 columns are whole groups.
SHAPES = {
    (200, 1280): 16,
    (3, 400, 384): 64,
    (2, 3, 130, 64): 64,
    (129, 2, 128, 16): 16,
    (128, 1024): 512,
    (130, 256): 16,
    (129, 48): 16,
    (131, 192): 64,
}
# Shapes with more tiles. The code over tiles is unrolled, so compile time grows with their number.
LARGE = {(200, 2048): 64, (2, 300, 768): 64, (128, 2048): 512}
# The dtype of the values, the dtype of the scales, whether rounding is stochastic, the seed.
HOW = (
    ("bfloat16", "bfloat16", False, 0),
    ("float32", "float32", True, 2**31 + 5),
    ("bfloat16", "float32", False, 0),
    ("float32", "bfloat16", True, 0),
)
# Several blocks, transposed heads, and rows of which no 128 columns are whole groups. How a tile is
# read and written does not depend on `HOW`, and rounding does not depend on how a tile is read.
QUICK = [((200, 1280), HOW[1]), ((2, 3, 130, 64), HOW[0]), ((131, 192), HOW[3])]
WHOLE = [
    (shape, how) for shape in SHAPES | LARGE for how in HOW[: 4 if shape == (2, 300, 768) else 2]
]


def named(case) -> str:
    return " ".join(map(str, (*case[0], *case[1])))


@pytest.fixture(
    params=[pytest.param((*case, "quick_compiles"), id=named(case)) for case in QUICK]
    + [
        pytest.param((*case, "optimized"), id=f"{named(case)} optimized", marks=pytest.mark.slow)
        for case in WHOLE
    ]
)
def case(request):
    """Values, the parameters of their encoding, and the parameters of their decoding."""
    shape, (dtype, scale, stochastic, seed), compiles = request.param
    request.getfixturevalue(compiles)
    group = (SHAPES | LARGE)[shape]
    how = {"group": group, "scale": scale, "stochastic": stochastic, "seed": seed}
    return hard(shape, dtype, group), how, {"width": shape[-1], "dtype": dtype}


def both(op: str, arrays, reference=None, **params) -> tuple:
    """Asserts that the kernel's results equal the reference's results, and returns them."""
    reference = reference or getattr(int4, op)
    wanted = jax.jit(functools.partial(reference, **params))(*arrays)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    kernel = functools.partial(getattr(launch, op), interpret=True, **params)
    assert equal(jax.jit(kernel)(*arrays), wanted), op
    return wanted


def test_groups(case):
    x, how, back = case
    both("dequantize", both("quantize", (x,), **how), **back)


def test_groups_with_an_offset(case):
    x, how, back = case
    both("dequantize_offset", both("quantize_offset", (x,), **how), **back)


def test_channels_with_scales(case):
    x, how, back = case
    scales = channel_scales(x, how.pop("scale"))
    codes = both("quantize_by", (x, scales), **how)
    both("dequantize_by", (*codes, scales), **back)


def test_channels_that_are_left_out(case):
    x, how, back = case
    width = x.shape[-1]
    channels = jnp.array([0, width // 2, width - 1])
    # The second of four slots is empty.
    slots = jnp.full(width, 4, jnp.int32).at[channels].set(jnp.array([0, 2, 3], jnp.int32))
    codes = both("quantize_without", (x, slots < 4), **how)
    values = x[..., jnp.array([0, 1, width // 2, width - 1])]
    # The kernel converts these values to float32, and hardware may flush denormals.
    values = jnp.where(jnp.abs(values) < jnp.finfo(x.dtype).tiny, 0, values)
    both("dequantize_with", (*codes, values, slots), **back)


def test_channels_whose_scales_are_found_as_they_are_encoded(case):
    x, how, back = case
    x = x[:200]  # all tokens must fit a program
    both("quantize_channelwise", (x,), jk.quantize_channelwise, **how)
    # Most channels of `hard` have a value that is not finite. Test channels of finite values too.
    x = jnp.where(jnp.isfinite(x), x, 1).astype(x.dtype)
    codes, scales = both("quantize_channelwise", (x,), jk.quantize_channelwise, **how)
    assert jnp.isfinite(scales).all()
    both("dequantize_by", (codes, scales), **back)


def test_channels_that_are_taken_out(case):
    x, how, back = case
    width = x.shape[-1]
    # The second of five slots is empty. The first and the last slot may be in two blocks.
    index = jnp.array([width // 2, width, 0, width - 1, 7], jnp.int32)
    # The kernel converts these values to float32, and hardware may flush denormals.
    x = jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, 0, x)
    *codes, values = both("quantize_separated", (x, index), jk.quantize_separated, **how)
    assert equal((values[..., 3],), (x[..., -1],))
    assert not values[..., 1].any()
    slots = jnp.full(width, 5, jnp.int32).at[index].set(jnp.arange(5, dtype=jnp.int32), mode="drop")
    both("dequantize_with", (*codes, values, slots), **back)


# Outside the kernel, values are compared with 0 before packing, and selected after unpacking. So
# each dtype is tested with one shape.
BITS = [((2, 130, 512), dtype) for dtype in ("bool", "int32", "bfloat16")]
BITS += [((131, 64), "bfloat16"), pytest.param((200, 1024), "int32", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("shape", "dtype"), BITS)
def test_bits(quick_compiles, shape, dtype):
    group = 64 if shape[-1] == 64 else 256
    x = (hard(shape, "float32", group) > 0).astype(dtype)
    ends = jnp.zeros((), dtype), jnp.ones((), dtype)
    codes = both("pack_bits", (x, ends[0]), bits.pack_bits, group=group)
    both("unpack_bits", (*codes, *ends), bits.unpack_bits, width=shape[-1])


def test_a_shape_that_no_kernel_takes_is_told():
    with pytest.raises(ValueError, match=r"`x` is \(64, 128\) in groups of 64; expected .* kernel"):
        blocks.of((64, 128), 64, 2)


def test_channels_that_no_program_holds_are_told():
    with pytest.raises(ValueError, match=r"`x` is \(32768, 128\) .* of 2 bytes .* expected"):
        blocks.of_channels((32768, 128), 64, 2, 2)


def test_blocks_of_channels_are_as_small_as_is_worth_it():
    columns = lambda *shape: blocks.of_channels(shape, 64, 2, 2).tiles.columns
    assert columns(4096, 1024) == columns(8, 2048, 1024) == 128
    assert columns(1024, 1024) == 512
    assert columns(256, 1024) == 1024


def test_the_shapes_are_taken_as_they_say():
    taken = {shape: blocks.of(shape, group, 2) for shape, group in (SHAPES | LARGE).items()}
    grids = {shape: b.grid for shape, b in taken.items()}
    assert grids[(200, 1280)] == (1, 1, 5)
    assert grids[(200, 2048)] == (1, 1, 2)
    assert grids[(3, 400, 384)] == (3, 1, 1)
    assert grids[(129, 2, 128, 16)] == (2, 1, 1)
    turned = {shape for shape, b in taken.items() if b.tiles.turned}
    assert turned == {shape for shape in taken if shape[-1] % 128}
