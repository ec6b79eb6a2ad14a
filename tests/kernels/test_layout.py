"""Groups of parts, and bits: what goes in comes out, whatever the shape."""

import math

import hypothesis.extra.numpy as hnp
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxmem_kernels as jk
from jaxmem_kernels import layout
from tests.kernels import oracle

SHAPES = [(0,), (1,), (7,), (64,), (130,), (3, 5), (0, 4), (4, 0), (2, 3, 8)]


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_inverted(shape, parts):
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    group = jk.fitted(shape[-1], 16, parts)
    blocks = layout.blocks(x, group, parts)
    assert blocks.shape == (*shape[:-1], -(-shape[-1] // group), parts, group // parts)
    np.testing.assert_array_equal(layout.unblocked(blocks, shape[-1]), x)
    for row, whole in (
        zip(np.reshape(blocks, (-1, math.prod(blocks.shape[-3:]))), x.reshape(-1, shape[-1]))
        if x.size
        else ()
    ):
        assert set(np.unique(row)) <= set(np.unique(whole)), (
            "nothing but a row's own values enters its groups"
        )


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        ((8, 5, 128), (8, 5, 128)),
        ((8, 4, 32), (8, 128)),
        ((3, 4, 32), (3, 128)),
        ((8, 5, 7), (280,)),
        ((130,), (130,)),
        ((), (1,)),
        ((4, 0), (0,)),
        ((0, 64), (0, 64)),
    ],
)
def test_no_more_axes_are_merged_than_groups_need(shape, want):
    assert jk.folded(shape, 64) == want


@given(hnp.arrays(bool, (2, 3, 24)))
@settings(max_examples=40)
def test_bits_are_a_bijection(b):
    packed = jk.pack_bits(b, False, group=24)
    assert np.asarray(packed).tobytes() == b"".join(oracle.bits(row) for row in b.reshape(6, 24))
    unpacked = jk.unpack_bits(packed, jnp.zeros((), bool), jnp.ones((), bool), width=24)
    assert unpacked.dtype == jnp.bool_
    np.testing.assert_array_equal(unpacked, b)
    of_numbers = jk.pack_bits(jnp.where(b, 1.5, -2.0), jnp.array(-2.0), group=24)
    np.testing.assert_array_equal(of_numbers, packed)
    np.testing.assert_array_equal(
        jk.unpack_bits(packed, jnp.array(-2.0), jnp.array(1.5), width=24), np.where(b, 1.5, -2.0)
    )
