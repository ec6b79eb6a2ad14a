"""TPUs by name and topology, and what their tiles pad."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem._target.devices.chips import CHIPS, TPUS, chip_of_kind
from jaxmem._target.devices.rates import LINK_EFFICIENCY, datasheet
from jaxmem._target.devices.target import Target
from jaxmem._target.devices.tiles import tiled_bytes
from jaxmem.errors import TargetError
from tests.shared.refused import refused


@pytest.mark.parametrize(
    ("text", "name", "devices", "hosts"),
    [
        ("v5e", "v5e", 1, 1),
        ("v5e:1", "v5e", 1, 1),
        ("v5e:8", "v5e:2x4", 8, 2),
        ("V6E:4X4", "v6e:4x4", 16, 4),
        ("v5e:16x16", "v5e:16x16", 256, 64),
        ("v4:4", "v4:2x2x1", 4, 1),
        ("v5p:64", "v5p:4x4x4", 64, 16),
        ("v5p:8x8x8", "v5p:8x8x8", 512, 128),
        ("tpu7x", "tpu7x", 2, 1),
        ("tpu7x:8", "tpu7x:2x2x2", 16, 2),
        ("v3:2x2", "v3:2x2", 8, 1),
    ],
)
def test_a_number_of_chips_or_a_topology(text, name, devices, hosts):
    target = Target.parse(text)
    assert (str(target), target.devices, target.hosts) == (name, devices, hosts)
    assert Target.parse(str(target)) == target
    assert (target.platform, target.gpu) == ("tpu", None)
    assert target.chip is TPUS[target.name]


@refused(
    TargetError,
    ("v5e:3", "'3' is no topology of 'v5e'; expected a number of chips that is a power of two"),
    ("v5e:0", "'0' is no topology"),
    ("v5p:4x4", r"'4x4' is no topology of 'v5p'; expected .* of 3 axes, as in 'v5p:4x4x4'"),
    ("v5e:2x2x2", "'2x2x2' is no topology of 'v5e'; expected .* of 2 axes"),
    ("v5e:4x", "'4x' is no topology"),
    ("v5e:-8", "'-8' is no topology"),
    ("v5e:", "did you mean 'v5e'"),
    ("v5", "did you mean 'v5e' or 'v5p'"),
)
def test_what_is_no_topology(text):
    Target.parse(text)


@pytest.mark.parametrize(
    ("text", "links"),
    [  # links by which an array that all devices gather reaches a device
        ("v5e:2x4", 2),
        ("v5e:8x16", 3),
        ("v6e:16x16", 4),
        ("v5p:2x2x1", 2),
        ("v5p:2x4x4", 3),
        ("v4:4x4x12", 6),
        ("v3:16x16", 2),
    ],
)
def test_an_axis_whose_ends_are_linked_brings_data_from_both_sides(text, links):
    target = Target.parse(text)
    assert target.peers == pytest.approx(LINK_EFFICIENCY * links * TPUS[target.name].link)


@pytest.mark.parametrize("tpu", TPUS.values(), ids=TPUS)
def test_products_reach_a_share_of_the_peak(tpu):
    assert datasheet(tpu).flops_16bit == tpu.product_efficiency * tpu.flops_16bit
    assert 0.5 < tpu.product_efficiency < 1


def test_kinds_of_devices_are_told_apart():
    for chip in CHIPS.values():
        if chip.platform == "tpu":
            assert chip_of_kind(chip.description) is chip
    assert chip_of_kind("TPU v5") is TPUS["v5p"]
    assert chip_of_kind("TPU v9") is None


@pytest.mark.parametrize(
    ("shape", "itemsize", "held"),
    [  # as the compiler lays out what a loop stacks, on v5e and v6e
        ((4, 4096, 1024), 2, (4, 4096, 1024)),
        ((4, 12, 8, 12, 1024, 64), 2, (4, 12, 8, 12, 64, 1024)),
        ((4, 1000, 37, 5), 4, (37, 5, 4, 1024)),
        ((4, 7, 100), 1, (7, 4, 128)),
        ((4, 3, 130), 4, (3, 4, 256)),
        ((1, 100), 4, (1, 128)),
        ((1, 100), 2, (2, 128)),
        ((1, 100), 1, (4, 128)),
        ((17, 1000), 4, (24, 1024)),
        ((5, 3), 2, (4, 128)),
        ((300,), 2, (512,)),
        ((1, 17, 1000), 4, (17, 1024)),
        ((1, 17, 1000), 2, (24, 1024)),
        ((), 4, (128,)),
        ((0, 8), 4, (0,)),
    ],
)
def test_bytes_in_tiles(shape, itemsize, held):
    assert tiled_bytes(shape, itemsize) == itemsize * math.prod(held)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.sampled_from([1, 2, 4]))
def test_tiles_only_add(shape, itemsize):
    plain, tiled = itemsize * math.prod(shape), tiled_bytes(shape, itemsize)
    assert tiled >= plain
    assert tiled % 512 == 0
    assert tiled_bytes(shape[::-1], itemsize) == tiled  # however the axes are ordered
    if len(shape) > 1:  # no more than the last two axes take as they stand
        rows, lanes = -(-shape[-2] // 8) * 8, -(-shape[-1] // 128) * 128
        assert tiled <= itemsize * math.prod(shape[:-2]) * rows * lanes
