"""Transfers between devices in the modules that `benchmarks/slices.py` compiles."""

from benchmarks.slices import by_kind

# Four turns of a loop. A turn gathers a weight beside other work, and scatters a sum by a fusion.
OF_A_TPU = """HloModule step, is_scheduled=true

%started (p: bf16[2,8]) -> (bf16[2,8], bf16[8,8]) {
  %p = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0} all-gather(%p), channel_id=1, dimensions={0}
}

%async_collective_fusion.1 (q: bf16[2,8]) -> bf16[8,8] {
  %q = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[8,8]{1,0} all-gather(%q), channel_id=1, dimensions={0}
}

%ended (r: bf16[2,8]) -> bf16[8,8] {
  %r = bf16[2,8]{1,0} parameter(0)
  ROOT %all-gather.3 = bf16[8,8]{1,0} all-gather(%r), channel_id=1, dimensions={0}
}

%scattered (s: f32[16]) -> f32[4] {
  %s = f32[16]{0} parameter(0)
  %all-reduce.1 = f32[16]{0} all-reduce(%s), channel_id=2, to_apply=%add
  ROOT %part = f32[4]{0} slice(%all-reduce.1), slice={[0:4]}
}

%body (state: (s32[], bf16[2,8], f32[16])) -> (s32[], bf16[2,8], f32[16]) {
  %state = (s32[], bf16[2,8]{1,0}, f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = bf16[2,8]{1,0} get-tuple-element(%state), index=1
  %g = f32[16]{0} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %async-collective-start.1 = bf16[8,8]{1,0} fusion(%w), kind=kCustom, calls=%started
  %fusion.1 = bf16[8,8]{1,0} fusion(%w), kind=kOutput, calls=%async_collective_fusion.1
  %async-collective-done.1 = bf16[8,8]{1,0} fusion(%w), kind=kCustom, calls=%ended
  %fusion.2 = f32[4]{0} fusion(%g), kind=kCustom, calls=%scattered
  ROOT %out = (s32[], bf16[2,8]{1,0}, f32[16]{0}) tuple(%next, %w, %g)
}

%condition (state.1: (s32[], bf16[2,8], f32[16])) -> pred[] {
  %state.1 = (s32[], bf16[2,8]{1,0}, f32[16]{0}) parameter(0)
  %j = s32[] get-tuple-element(%state.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%j, %four), direction=LT
}

ENTRY %main (a: bf16[2,8], b: f32[16]) -> f32[16] {
  %a = bf16[2,8]{1,0} parameter(0)
  %b = f32[16]{0} parameter(1)
  %zero = s32[] constant(0)
  %first = (s32[], bf16[2,8]{1,0}, f32[16]{0}) tuple(%zero, %a, %b)
  %while.1 = (s32[], bf16[2,8]{1,0}, f32[16]{0}) while(%first), condition=%condition, body=%body
  %last = f32[16]{0} get-tuple-element(%while.1), index=2
  ROOT %all-reduce.2 = f32[16]{0} all-reduce(%last), channel_id=3, to_apply=%add
}
"""


def test_a_collective_of_a_loop_counts_once_a_turn_however_many_fusions_run_it():
    assert by_kind(OF_A_TPU) == {
        "all-gather": {"runs": 4, "bytes": 4 * 8 * 8 * 2},
        "reduce-scatter": {"runs": 4, "bytes": 4 * 16 * 4},
        "all-reduce": {"runs": 1, "bytes": 16 * 4},
    }
