"""What the suite saves in compiles, the fixture `quick_compiles` and processes that go on with the
next compiler: nothing that a test of bytes or HLO reads.
"""

import dataclasses

import jax
import pytest

from jaxmem._target.deviceless.compiler import Compiler
from tests.shared import compilers, models
from tests.shared.deviceless import result


def test_the_program_and_its_bytes_are_the_same(optimized):
    step = models.build_with(lambda policy: models.scanned(policy, models.narrow))(None)
    traced = jax.jit(step, donate_argnums=0).trace(models.parameters(), models.batch())
    found = []
    for quick in (False, True):
        jax.config.update("jax_disable_most_optimizations", quick)
        compiled = traced.lower().compile()
        found.append((compiled.as_text(), str(compiled.memory_analysis())))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_process_that_goes_on_compiles_as_a_new_one():
    step = models.build_with(lambda policy: models.scanned(policy, models.narrow))(None)
    shapes = jax.eval_shape(lambda: (models.parameters(), models.batch()))

    def compiled() -> tuple[dict, int]:
        with Compiler("h200", workers=1) as compiler:
            found = dataclasses.asdict(result(compiler, step, *shapes, donate=0))
            (process,) = compiler._children
            return found | {"compile_seconds": 0.0}, process.pid

    (first, pid), (again, same) = compiled(), compiled()
    assert pid == same
    with pytest.MonkeyPatch.context() as patch:
        compilers.start_alone(patch)
        alone, other = compiled()
    assert other != pid
    assert first == again == alone
    assert alone["xla_seconds"] > 0
