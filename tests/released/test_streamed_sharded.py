"""ZeRO-3 with states in host memory: each device fetches its part of a layer, gathers the layer,
and updates its part.
"""

import pytest

from jaxmem._target.deviceless.process import child_environment
from tests.shared import children
from tests.shared.marks import slow


@pytest.fixture(scope="module")
def eight():
    """What eight devices find."""
    return children.printed(children.with_cpus(8), "tests.programs.streamed_zero3")


def test_eight_devices_train_as_with_resident_states(eight):
    assert eight["devices"] == 8
    there = "pinned_host P(None, 'data')"
    for persist, found in eight["found"].items():
        # Relative to numbers of about 1.
        assert found["far"] <= 1e-6
        here = [] if persist == "0" else ["device P(None, 'data')"]
        assert [p.replace("PartitionSpec", "P") for p in found["places"]] == [*here, there]
    for error in eight["errors"].values():
        assert "expected data_parallel(mesh, 'states')" in error


# With all states on the devices, layers that are gathered one at a time train as layers that are
# gathered at once. Ratios of rows equal the ratios of resident states: each device has a part of
# some rows, and other rows are divided over devices. A split state is updated to the end of each
# stack where moments are divided over one of a mesh's two axes; the other axis holds copies.
@pytest.mark.parametrize("way", ["by layer", "row", "moments"])
def test_other_ways_train_as_resident_states(eight, way):
    assert eight[way] <= 1e-6


@pytest.mark.slow
def test_states_are_divided_over_one_of_a_meshs_axes_and_over_explicit_ones():
    """The other axis holds copies: the values are those of a mesh without it."""
    found = children.printed(children.with_cpus(8), "tests.programs.streamed_zero3", "meshes")
    assert set(found) == {"two axes", "explicit"}
    for mesh in found.values():
        assert mesh["far"] <= 1e-6
        kinds = [place.split()[0] for place in mesh["places"]]
        assert kinds == ["device", "pinned_host"]
        assert all("(None, 'data'" in place for place in mesh["places"])


@pytest.mark.parametrize(
    ("gpu", "devices", "persist", "n"),
    [
        ("h200", 8, 2, 1),
        slow("h200", 8, 0, 2),
        slow("a100-80gb", 16, 3, 2),
        slow("h200", 64, 0, 1),
    ],
)
def test_a_layer_is_gathered_and_its_gradient_scattered_in_the_dtype_of_the_layers(
    gpu, devices, persist, n
):
    environment = child_environment(children.finding_packages())
    program = "tests.programs.deviceless_zero3"
    found = children.printed(environment, program, gpu, devices, persist, n)
    assert found["host_bytes"] == found["part"] > 0
    assert found["fault"] is None
    layer, layers = 2 * found["layer"], 6  # bytes of one in bfloat16, and how many there are

    def of(kind) -> list[dict]:
        return [c for c in found["collectives"] if c["kind"] == kind]

    total = lambda kind: sum(c["nbytes"] * c["runs"] for c in of(kind))
    # A layer's turn gathers that layer alone, in the forward and in the backward.
    assert total("all-gather") == 2 * n * layers * layer
    assert total("reduce-scatter") == n * layers * layer
    for c in of("all-gather") + of("reduce-scatter"):
        assert c["dtypes"] == ["bf16"]
        assert c["nbytes"] <= layer
    # The rest are scalars: whether a layer's gradient is finite.
    assert {c["nbytes"] for c in of("all-reduce")} == {4}
    kinds = {c["kind"] for c in found["collectives"]}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce"}
