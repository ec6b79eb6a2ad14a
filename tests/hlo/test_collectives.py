"""Times of what moves between TPUs, in modules that are written by hand."""

import pytest

from tests.shared.tpu_modules import MATRIX, TILES, P, Q, seconds


def test_what_crosses_hides_if_it_may():
    gathered = f"f32[1024,512]{TILES}"
    at_once = f"ROOT %g = {gathered} all-gather(%p), dimensions={{0}}"
    assert seconds(P, at_once) == pytest.approx(4 * MATRIX / 1e8)
    start = f"%g = (f32[256,512]{TILES}, {gathered}) all-gather-start(%p), dimensions={{0}}"
    done = f"%h = {gathered} all-gather-done(%g)"
    work = [f"%n{k} = f32[256,512]{TILES} negate(%q)" for k in range(50)]
    assert 50 * 2 * MATRIX / 1e9 > 4 * MATRIX / 1e8
    assert seconds(P, Q, start, *work, done) == pytest.approx(50 * 2 * MATRIX / 1e9)
    assert seconds(P, Q, start, done) == pytest.approx(4 * MATRIX / 1e8)


def test_permutes_cross_by_the_links_to_neighbours_alone():
    line = f"ROOT %g = f32[256,512]{TILES} collective-permute(%p), source_target_pairs={{{{0,1}}}}"
    assert seconds(P, line) == pytest.approx(MATRIX / 5e7)


def test_a_collective_of_several_arrays_moves_them_all():
    several = ", ".join([f"f32[256,512]{TILES}"] * 3)
    line = f"ROOT %g = ({several}) all-reduce(%p, %q, %p), to_apply=%sum"
    assert seconds(P, Q, line) == pytest.approx(2 * 3 * MATRIX / 1e8)


WRAPPED = f"""
%inner (a: f32[256,512]) -> f32[1024,512] {{
  %a = f32[256,512]{TILES} parameter(0)
  ROOT %g = f32[1024,512]{TILES} all-gather(%a), dimensions={{0}}
}}
"""


def test_collectives_in_wrappers_and_fusions_cross():
    start = f"%s = ((f32[256,512]{TILES}), f32[1024,512]{TILES}) async-start(%p), calls=%inner"
    done = f"ROOT %d = f32[1024,512]{TILES} async-done(%s)"
    assert seconds(P, start, done, more=WRAPPED) == pytest.approx(4 * MATRIX / 1e8)
    fused = f"%async-collective-start.2 = f32[1024,512]{TILES} fusion(%p), calls=%inner"
    assert seconds(P, fused, more=WRAPPED) == pytest.approx(4 * MATRIX / 1e8)
    ended = f"%async-collective-done.2 = f32[1024,512]{TILES} fusion(%p), calls=%inner"
    assert seconds(P, ended, more=WRAPPED) == 0.0


ARRAYS = ", ".join(f"f32[{n},512]{TILES}" for n in (256, 256, 1024, 1024))
CARRIED = f"""
%async_collective_fusion.7 (a: f32[256,512], b: f32[1024,512], c: f32[256,512]) -> ({ARRAYS}) {{
  %a = f32[256,512]{TILES} parameter(0)
  %b = f32[1024,512]{TILES} parameter(1)
  %c = f32[256,512]{TILES} parameter(2)
  %n = f32[256,512]{TILES} negate(%c)
  %g = f32[1024,512]{TILES} all-gather(%a), dimensions={{0}}
  ROOT %t = ({ARRAYS}) tuple(%n, %a, %b, %g)
}}
"""


def test_a_fusion_that_carries_a_collective_on_moves_what_it_works_on_alone():
    """The buffers of an all-gather go through every kernel beside which it crosses, in place."""
    aliased = "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}"
    given = f"%w = f32[1024,512]{TILES} parameter(2)"
    line = (
        f"ROOT %f = ({ARRAYS}) fusion(%p, %w, %q), kind=kLoop, {aliased},"
        " calls=%async_collective_fusion.7"
    )
    assert seconds(P, Q, given, line, more=CARRIED) == pytest.approx(2 * MATRIX / 1e9)
    copied = line.replace(aliased, "output_to_operand_aliasing={{3}: (1, {})}")
    # What is handed on elsewhere than in place is written.
    assert seconds(P, Q, given, copied, more=CARRIED) == pytest.approx(7 * MATRIX / 1e9)


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
def test_a_reduction_in_a_fusion_holds_the_others_up(kind):
    inner = WRAPPED.replace("all-gather(%a), dimensions={0}", f"{kind}(%a)")
    inner = inner.replace("f32[1024,512]", "f32[256,512]")
    fused = f"ROOT %r = f32[256,512]{TILES} fusion(%p), kind=kCustom, calls=%inner"
    assert seconds(P, fused, more=inner) == pytest.approx(MATRIX / 1e8 + 2 * MATRIX / 1e9)
