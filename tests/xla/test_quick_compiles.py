"""What the fixture `quick_compiles` may leave out: nothing that a test of bytes or HLO reads."""

import jax
import pytest

from tests.shared import models

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]


def test_the_program_and_its_bytes_are_the_same(optimized):
    step = models.build_with(lambda policy: models.scanned(policy, models.narrow))(None)
    traced = jax.jit(step, donate_argnums=0).trace(models.parameters(), models.batch())
    found = []
    for quick in (False, True):
        jax.config.update("jax_disable_most_optimizations", quick)
        compiled = traced.lower().compile()
        found.append((compiled.as_text(), str(compiled.memory_analysis())))
    assert found[0] == found[1]
