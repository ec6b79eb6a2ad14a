"""Times of TPU modules, from texts written by hand: every number is reckoned beside it."""

import pytest

from jaxmem._target.hlo.products import dilated_flops
from jaxmem._target.hlo.roofline import TpuRates, tpu_costs
from jaxmem._target.hlo.text import HloModule
from tests.shared.tpu_modules import MATRIX, ON_CORE, RATES, TILES, P, Q, module, seconds

ADD = f"ROOT %r = f32[256,512]{TILES} add(%p, %q)"


def test_what_moves_is_read_and_written_once():
    assert seconds(P, Q, ADD) == pytest.approx(3 * MATRIX / 1e9)


def test_what_lies_in_a_core_moves_nowhere():
    here = P.replace(TILES, ON_CORE)
    assert seconds(here, Q, ADD) == pytest.approx(2 * MATRIX / 1e9)
    all_here = [line.replace(TILES, ON_CORE) for line in (P, Q, ADD)]
    assert seconds(*all_here) == pytest.approx(256 * 512 / 1e10), "its arithmetic remains"


def test_tiles_are_moved_whole():
    narrow = "{1,0:T(8,128)}"
    lines = [f"%p = f32[256,3]{narrow} parameter(0)", f"ROOT %r = f32[256,3]{narrow} negate(%p)"]
    assert seconds(*lines) == pytest.approx(2 * 4 * 256 * 128 / 1e9)


def test_products_take_their_flops():
    dot = (
        f"ROOT %r = f32[256,256]{TILES} convolution(%p, %q), dim_labels=bf_oi->bf",
        2 * 256 * 256 * 512,
    )
    costs = tpu_costs(module(P, Q, dot[0]), RATES)
    assert (costs.matmul_flops, costs.matmuls) == (dot[1], 1)
    slow = TpuRates(1e9, 1e9, 1e10, 0.0, 0.0)
    assert tpu_costs(module(P, Q, dot[0]), slow).seconds == pytest.approx(dot[1] / 1e9)


FUSED = f"""
%fused (a: f32[8,256,512], b: f32[256,512], i: s32[]) -> f32[8,256,512] {{
  %a = f32[8,256,512]{{2,1,0:T(8,128)}} parameter(0)
  %b = f32[256,512]{TILES} parameter(1)
  %i = s32[]{{:T(128)}} parameter(2)
  %t = f32[1,256,512]{{2,1,0:T(8,128)}} bitcast(%b)
  ROOT %u = f32[8,256,512]{{2,1,0:T(8,128)}} dynamic-update-slice(%a, %t, %i, %i, %i)
}}

%sliced (c: f32[8,256,512], j: s32[]) -> f32[256,512] {{
  %c = f32[8,256,512]{{2,1,0:T(8,128)}} parameter(0)
  %j = s32[]{{:T(128)}} parameter(1)
  %s = f32[1,256,512]{{2,1,0:T(8,128)}} dynamic-slice(%c, %j, %j, %j)
  ROOT %v = f32[256,512]{TILES} bitcast(%s)
}}
"""
STACK = "%k = f32[8,256,512]{2,1,0:T(8,128)} parameter(2)"
INDEX = "%n = s32[]{:T(128)} parameter(3)"


def test_of_a_stack_only_the_layer_moves():
    put = "ROOT %r = f32[8,256,512]{2,1,0:T(8,128)} fusion(%k, %p, %n), kind=kLoop, calls=%fused"
    scalar = 4 * 128
    assert seconds(P, STACK, INDEX, put, more=FUSED) == pytest.approx((2 * MATRIX + scalar) / 1e9)
    take = f"ROOT %r = f32[256,512]{TILES} fusion(%k, %n), kind=kLoop, calls=%sliced"
    assert seconds(STACK, INDEX, take, more=FUSED) == pytest.approx((2 * MATRIX + scalar) / 1e9)


LOOP = f"""
%body (s: (s32[], f32[256,512])) -> (s32[], f32[256,512]) {{
  %s = (s32[]{{:T(128)}}, f32[256,512]{TILES}) parameter(0)
  %i = s32[]{{:T(128)S(6)}} get-tuple-element(%s), index=0
  %x = f32[256,512]{TILES} get-tuple-element(%s), index=1
  %y = f32[256,512]{TILES} negate(%x)
  ROOT %t = (s32[]{{:T(128)}}, f32[256,512]{TILES}) tuple(%i, %y)
}}

%condition (c: (s32[], f32[256,512])) -> pred[] {{
  %bound = s32[]{{:T(128)}} constant(12)
  %c = (s32[]{{:T(128)}}, f32[256,512]{TILES}) parameter(0)
  %at = s32[]{{:T(128)}} get-tuple-element(%c), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%at, %bound), direction=LT
}}
"""


def turning(number="s32", carried=TILES, first="zero"):
    """A loop that begins with the counter `first` and the array %p, in the layout `carried`."""
    state = f"({number}[]{{:T(128)}}, f32[256,512]{carried})"
    return (
        f"%init = {state} tuple(%{first}, %p)",
        f"%loop = {state} while(%init), condition=%condition, body=%body",
    )


TURNING = "%zero = s32[]{:T(128)} constant(0)", *turning()


def test_loops_turn_as_often_as_their_condition_says():
    assert seconds(P, *TURNING, more=LOOP) == pytest.approx(12 * 2 * MATRIX / 1e9)
    endless = LOOP.replace("constant(12)", "parameter(1)")
    assert seconds(P, *TURNING, more=endless) == pytest.approx(2 * MATRIX / 1e9), "once"


COPY = (
    f"%cs = (f32[256,512]{ON_CORE}, f32[256,512]{TILES}, u32[]{{:S(2)}}) copy-start(%p)",
    f"%cd = f32[256,512]{ON_CORE} copy-done(%cs)",
)


def test_copies_hide_where_the_memory_is_idle():
    dot = f"%d = f32[256,256]{ON_CORE} convolution(%h, %h), dim_labels=bf_oi->bf"
    here = f"%h = f32[256,512]{ON_CORE} parameter(1)"
    slow = TpuRates(1e9, 1e11, 1e10, 0.0, 0.0)
    flops, copied = 2 * 256 * 256 * 512 / 1e11, MATRIX / 1e9
    assert copied < flops
    both = tpu_costs(module(P, here, *COPY, dot), slow).seconds
    assert both == pytest.approx(flops)
    alone = tpu_costs(module(P, *COPY), slow).seconds
    assert alone == pytest.approx(copied)


def test_copies_hide_beside_a_loop_that_leaves_the_memory_idle_if_they_last_as_long():
    inside = LOOP.replace(f"f32[256,512]{TILES}", f"f32[256,512]{ON_CORE}")
    here = f"%x = f32[256,512]{ON_CORE} parameter(1)"
    first, again = turning(carried=ON_CORE)
    loop = TURNING[0], here, first.replace("%p", "%x"), again
    slow = TpuRates(1e9, 1e12, 1e8, 0.0, 0.0)
    turns, copied = 12 * 256 * 512 / 1e8, MATRIX / 1e9
    assert copied < turns
    start, done = COPY
    told = lambda *lines: tpu_costs(module(P, *lines, more=inside), slow).seconds
    assert told(start, *loop, done) == pytest.approx(turns, rel=1e-3)
    assert told(start, done, *loop) == pytest.approx(turns + copied, rel=1e-3)
    # Of a copy that takes longer than the loop, the rest is waited for.
    quick = TpuRates(1e9, 1e12, 1e10, 0.0, 0.0)
    assert tpu_costs(module(P, start, *loop, done, more=inside), quick).seconds == pytest.approx(
        copied, rel=1e-3
    )


def test_what_is_scattered_stands_behind_its_indices():
    rows = f"%u = f32[64,512]{TILES} parameter(1)"
    where = "%i = s32[64]{0:T(128)} parameter(2)"
    line = f"ROOT %s = f32[256,512]{TILES} scatter(%p, %i, %u), to_apply=%sum"
    assert seconds(P, rows, where, line) == pytest.approx(2 * MATRIX / 4 / 1e9)


def test_copies_to_the_host_are_left_out():
    there = "{1,0:T(8,128)S(5)}"
    copy = f"%cs = (f32[256,512]{there}, f32[256,512]{TILES}, u32[]{{:S(2)}}) copy-start(%p)"
    assert seconds(P, copy, f"%cd = f32[256,512]{there} copy-done(%cs)") == 0


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        (  # [b, m, k] x [b, k, n], b as a window of which each result reads one position
            "%r = f32[12,64,32]{2,1,0} convolution(%a, %b), window={size=12 stride=11 pad=0_0"
            " lhs_dilate=12}, dim_labels=0bf_0io->0bf",
            2 * 12 * 64 * 32 * 16,
        ),
        (  # a convolution whose edges are padded: of 3 x 3 places the corners read 4
            "%r = f32[12,6,6,32]{3,2,1,0} convolution(%c, %d), window={size=3x3 pad=1_1x1_1},"
            " dim_labels=b01f_01io->b01f",
            2 * 12 * 32 * 5 * (3 * 6 - 2) ** 2,
        ),
        (  # every second position
            "%r = f32[12,3,3,32]{3,2,1,0} convolution(%c, %d), window={size=3x3 stride=2x2"
            " pad=0_1x0_1}, dim_labels=b01f_01io->b01f",
            2 * 12 * 32 * 5 * (3 * 3 - 1) ** 2,
        ),
    ],
)
def test_positions_that_read_padding_are_no_work(line, flops):
    text = module(
        "%a = f32[12,64,16]{2,1,0} parameter(0)",
        "%b = f32[12,16,32]{2,1,0} parameter(1)",
        "%c = f32[12,6,6,5]{3,2,1,0} parameter(2)",
        "%d = f32[3,3,5,32]{3,2,1,0} parameter(3)",
        line,
    )
    read = HloModule(text)
    assert dilated_flops(read.body(read.entry)[-1]) == flops


def test_counters_begin_and_rise_as_the_loop_says():
    """As XLA writes a product that waits for its operands from other devices: by twos, unsigned."""
    body = LOOP.replace("s32", "u32").replace("constant(12)", "constant(11)")
    body = body.replace(
        "ROOT %t = (u32[]{:T(128)}, f32[256,512]" + TILES + ") tuple(%i, %y)",
        "%two = u32[]{:T(128)} constant(2)\n  %n = u32[]{:T(128)} add(%i, %two)\n"
        "  ROOT %t = (u32[]{:T(128)}, f32[256,512]" + TILES + ") tuple(%n, %y)",
    )
    loop = (
        "%three = u32[]{:T(128)} constant(3)",
        "%copied = u32[]{:T(128)} copy(%three)",
        *turning("u32", first="copied"),
    )
    scalars = 2 * 2 * 512 + 4 * 3 * 512  # bytes of the copy, and of the sums in four turns
    assert seconds(P, *loop, more=body) == pytest.approx((4 * 2 * MATRIX + scalars) / 1e9, rel=1e-2)


def test_two_numbers_of_four_bits_share_a_byte():
    layout = "{1,0:T(8,128)(8,1)E(4)}"
    lines = [f"%p = s4[256,512]{layout} parameter(0)", f"ROOT %r = s4[256,512]{layout} copy(%p)"]
    assert seconds(*lines) == pytest.approx(2 * 256 * 512 / 2 / 1e9)


def test_elements_of_tuples_may_be_written_with_their_number():
    """As libtpu 0.0.48 does, where others take them by instructions of their own."""
    newer = LOOP.replace("compare(%at, %bound)", "compare(%c#0, %bound)")
    newer = newer.replace("negate(%x)", "negate(%s#1)")
    assert seconds(P, *TURNING, more=newer) == pytest.approx(12 * 2 * MATRIX / 1e9)


KERNEL = f'ROOT %r = f32[256,512]{TILES} custom-call(%p, %q), custom_call_target="tpu_custom_call"'
SLOW = TpuRates(1e9, 1e9, 1e10, 0.0, 0.0)


def test_a_kernel_computes_what_its_author_says():
    """A Pallas kernel's module does not tell; else its bytes are all that counts."""
    assert seconds(P, Q, KERNEL) == pytest.approx(3 * MATRIX / 1e9)
    said = '"cost_estimate":{"flops":"5000000000","transcendentals":"20000000000"}'
    told = f'{KERNEL}, backend_config={{"custom_call_config":{{"body":"TUxJ",{said}}}}}'
    costs = tpu_costs(module(P, Q, told), SLOW, [(((256, 512),) * 2, ((256, 512),), 7)])
    assert (costs.matmul_flops, costs.matmuls) == (5_000_000_000, 1)
    assert costs.seconds == pytest.approx(4 * 2e10 / 1e10), "an exponential is four operations"


@pytest.mark.parametrize(
    "added",
    [
        '{kernel_metadata={\n"sizes":"{\\"q\\": 128}"\n}}, metadata={op_name="a"}',
        '{kernel_metadata={\n"sizes":"{", "more":{\n"n":1\n}}}, metadata={op_name="a"}',
        '{kernel_metadata={"a":1,\n"b":2\n}}, metadata={op_name="a"}',
    ],
)
def test_what_an_author_adds_to_a_kernel_may_take_lines_of_its_own(added):
    """As splash attention's does, the last of which begins as the end of a computation."""
    kernel = f"{KERNEL.removeprefix('ROOT ')}, frontend_attributes={added}"
    after = ADD.replace("%r", "%s").replace("add(%p", "add(%r")
    assert seconds(P, Q, kernel, after) == pytest.approx(6 * MATRIX / 1e9)


@pytest.mark.parametrize(("rows", "flops"), [(256, 3_000_000_000), (128, 0)])
def test_or_what_the_trace_told_of_one_with_its_shapes(rows, flops):
    traced = [[[[rows, 512], [256, 512]], [[256, 512]], 3_000_000_000]]  # lists, as JSON has them
    costs = tpu_costs(module(P, Q, KERNEL), SLOW, traced)
    assert (costs.matmul_flops, costs.matmuls) == (flops, int(flops > 0))
    other = KERNEL.replace("tpu_custom_call", "Sharding")
    assert tpu_costs(module(P, Q, other), SLOW, traced).matmul_flops == 0
    assert costs.seconds == pytest.approx(flops / 1e9 or 3 * MATRIX / 1e9)
