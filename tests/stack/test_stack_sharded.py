"""The stack over a mesh: automatic partitioning, shard_map and accumulation, on four devices in a
process of their own.
"""

import pytest

from tests.shared import children


def errors(*plans) -> dict[str, float]:
    found = children.printed(children.with_cpus(4), "tests.programs.sharded_stack", *plans)
    assert len(found) == 6 * len(plans)
    return found


def test_gradients_over_a_mesh_are_those_of_one_device():
    found = errors("groups")
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-12)


@pytest.mark.slow
def test_gradients_over_a_mesh_under_other_plans():
    found = errors("none", "recompute")
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-12)
    lossy = errors(
        "compress"
    )  # a codec that sees one device's part of a tensor, in other groups, gives other codes
    assert lossy == pytest.approx(dict.fromkeys(lossy, 0.0), abs=0.2)
