"""What kernels of a TPU's program are reckoned to move of a loop's stacks."""

import math

from jaxmem._target.hlo.roofline import TpuRates, tpu_costs

# Nothing but the device's memory takes time: a second a byte.
BYTES = TpuRates(
    bandwidth=1.0, products=math.inf, vector=math.inf, ring=math.inf, neighbours=math.inf
)
STACK, LAYER = 8 * 64 * 256, 64 * 256
SMALL, LARGE = "{2,1,0:T(8,128)(4,1)}", "{2,1,0:T(32,128)(4,1)}"
# A loop's stack in large tiles, which kernels read and update in small ones.
TILED = f"""
%retiled (p: u8[8,64,256]) -> u8[8,64,256] {{
  %p = u8[8,64,256]{LARGE} parameter(0)
  ROOT %c = u8[8,64,256]{SMALL} copy(%p)
}}

%updated (s: u8[8,64,256], n: u8[1,64,256], i: s32[]) -> u8[8,64,256] {{
  %s = u8[8,64,256]{LARGE} parameter(0)
  %t = u8[8,64,256]{SMALL} fusion(%s), kind=kLoop, WHERE, calls=%retiled
  %n = u8[1,64,256]{SMALL} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = u8[8,64,256]{LARGE} dynamic-update-slice(%t, %n, %i, %i, %i)
}}

%taken (q: u8[8,64,256], j: s32[]) -> u8[1,64,256] {{
  %q = u8[8,64,256]{LARGE} parameter(0)
  %v = u8[8,64,256]{SMALL} fusion(%q), kind=kLoop, WHERE, calls=%retiled
  %j = s32[] parameter(1)
  ROOT %d = u8[1,64,256]{SMALL} dynamic-slice(%v, %j, %j, %j), dynamic_slice_sizes={{1,64,256}}
}}

ENTRY %main (stack: u8[8,64,256], layer: u8[1,64,256], at: s32[]) -> u8[1,64,256] {{
  %stack = u8[8,64,256]{LARGE} parameter(0)
  %layer = u8[1,64,256]{SMALL} parameter(1)
  %at = s32[] parameter(2)
  %put = u8[8,64,256]{LARGE} fusion(%stack, %layer, %at), kind=kLoop, calls=%updated
  ROOT %get = u8[1,64,256]{SMALL} fusion(%put, %at), kind=kLoop, calls=%taken
}}
"""


def moved(text: str) -> float:
    return tpu_costs(text, BYTES).seconds


def test_a_stack_that_is_tiled_otherwise_in_place_moves_a_layer():
    in_place = TILED.replace("WHERE", "output_to_operand_aliasing={{}: (0, {})}")
    indices = 2 * 4
    assert moved(in_place) == 4 * LAYER + indices  # read and written, twice
    # Elsewhere than in place, all of it is read twice.
    assert moved(TILED.replace("WHERE, ", "")) == 2 * STACK + 3 * LAYER + indices
