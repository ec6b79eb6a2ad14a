"""A rectifier plans under the mesh that `jax.set_mesh` sets for the training."""

import pytest

from tests.shared import children
from tests.shared.marks import slow


@pytest.mark.parametrize("kind", ["Explicit", slow("Auto")])
def test_the_planning_thread_sees_a_mesh_that_was_set_after_the_rectifier_was_made(kind):
    program = "tests.programs.rectified_on_mesh", kind
    found = children.printed(children.with_cpus(4), *program)
    assert 0 < found["bytes"] <= found["budget"]
    assert 0 <= found["far"] < 1e-2, "a codec may lose some of the gradient"
