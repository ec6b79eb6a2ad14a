"""Rows of parts, and bits: what goes in comes out, whatever the shape."""

import math

import hypothesis.extra.numpy as hnp
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxmem_kernels as jk
from tests.kernels import oracle

pytestmark = pytest.mark.core
SHAPES = [(), (0,), (1,), (7,), (64,), (130,), (3, 5), (0, 4), (4, 0), (2, 3, 8)]


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_layouts_are_inverted(shape, parts):
    x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    blocks = jk.to_parts(x, 16, parts)
    assert blocks.shape == jk.part_shape(shape, 16, parts)
    assert blocks.size - x.size < max(16, parts)
    np.testing.assert_array_equal(jk.from_parts(blocks, shape), x)
    assert set(np.unique(blocks)) <= set(np.unique(x)), "nothing but `x`'s own values enters a group"
    rows = jk.to_rows(x, parts)
    assert rows.shape == jk.row_shape(shape, parts)
    np.testing.assert_array_equal(jk.from_rows(rows, shape), x)


@given(hnp.arrays(bool, (2, 8, 3)))
@settings(max_examples=40)
def test_bits_are_a_bijection(b):
    packed = jk.pack_bits(jnp.asarray(b))
    assert np.asarray(packed).tobytes() == b"".join(oracle.bits(row.ravel()) for row in b)
    unpacked = jk.unpack_bits(packed)
    assert unpacked.dtype == jnp.bool_
    np.testing.assert_array_equal(unpacked, b)
