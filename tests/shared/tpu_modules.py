"""TPU modules that tests write by hand, and their estimated seconds."""

from jaxmem._target.hlo.roofline import TpuRates, tpu_costs

RATES = TpuRates(bandwidth=1e9, products=1e12, vector=1e10, ring=1e8, neighbours=5e7)
TILES = "{1,0:T(8,128)}"
ON_CORE = "{1,0:T(8,128)S(1)}"
MATRIX = 4 * 256 * 512  # bytes of f32[256,512]


def module(*lines: str, more: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, is_scheduled=true\n{more}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"
    )


def seconds(*lines: str, more: str = "") -> float:
    found = tpu_costs(module(*lines, more=more), RATES).seconds
    assert found is not None
    return found


P = f"%p = f32[256,512]{TILES} parameter(0)"
Q = f"%q = f32[256,512]{TILES} parameter(1)"
