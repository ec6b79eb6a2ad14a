"""Run by test_compiled.py: every kernel compiled for GPUs that are not there, and read back from
its disassembly.

    python -m tests.kernels.compiled FOLDER CAPABILITY...   (of several, float32 and stochastic
    rounding too)

FOLDER takes what the compiler leaves. A line of JSON a kernel: bytes spilled, and how many bytes
loads and stores move.
"""

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import triton

import jaxmem_kernels as jk

TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
FOLDER = pathlib.Path(sys.argv[1])
LEAD, WIDTH, GROUP = (8, 256), 768, 64


def shape(*axes, dtype="uint8"):
    return jax.ShapeDtypeStruct(axes, jnp.dtype(dtype))


def cases(dtype: str, stochastic: bool) -> dict:
    """Functions and their arguments, by the kernel they are to become."""
    x, channels = shape(*LEAD, WIDTH, dtype=dtype), shape(WIDTH, dtype="bfloat16")
    codes = shape(*LEAD, WIDTH // GROUP, GROUP // 2)
    scales = shape(*LEAD, WIDTH // GROUP, dtype="bfloat16")
    how, back = {"group": GROUP, "stochastic": stochastic}, {"width": WIDTH, "dtype": dtype}
    flat = shape(2**18 + 3, dtype=dtype)
    values, slots = shape(*LEAD, 8, dtype=dtype), shape(WIDTH, dtype="int32")
    return {
        "encode": (lambda x: jk.quantize(x, scale="bfloat16", **how), x),
        "encode_offset": (lambda x: jk.quantize_offset(x, scale="bfloat16", **how), x),
        "encode_without": (
            lambda x, t: jk.quantize_without(x, t, scale="bfloat16", **how),
            x,
            shape(WIDTH, dtype="bool"),
        ),
        "encode_by": (lambda x, s: jk.quantize_by(x, s, **how), x, channels),
        "encode flat": (lambda x: jk.quantize(x, scale="bfloat16", **how), flat),
        "decode": (lambda *c: jk.dequantize(*c, **back), codes, scales),
        "decode_offset": (lambda *c: jk.dequantize_offset(*c, **back), codes, scales, scales),
        "decode_with": (lambda *c: jk.dequantize_with(*c, **back), codes, scales, values, slots),
        "decode_by": (lambda *c: jk.dequantize_by(*c, **back), codes, channels),
    }


def compiled(name: str, function, *arguments, capability: int) -> dict:
    """What the disassembly of the one kernel in a program says."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with jk.compiling_for(capability):
        jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    (ptx,) = FOLDER.rglob("*.ptx")
    assert ptx.stem == name.split()[0], (ptx, name)
    cubin = ptx.with_suffix(".cubin")
    target = re.search(r"\.target (\w+)", ptx.read_text())[1]  # pyright: ignore[reportOptionalSubscript]
    newer = TOOLS / "ptxas-blackwell"
    assembler = newer if capability >= 100 and newer.exists() else TOOLS / "ptxas"
    done = subprocess.run(
        [assembler, "-v", f"-arch={target}", ptx, "-o", cubin], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    text = subprocess.run(
        [TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    widths = {}
    for way in ("LDG", "STG"):
        # [.E[.U8|.U16|.64|.128]]: an access of 4 bytes names no width
        found = re.findall(rf"\b{way}((?:\.\w+)*)\s", text)
        widths[way] = [
            int(m[1]) // 8 if (m := re.search(r"\.[US]?(8|16|64|128)\b", f)) else 4 for f in found
        ]
    return {
        "kernel": name,
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr))),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", text)),
        "loads": widths["LDG"],
        "stores": widths["STG"],
    }


def main() -> None:
    os.environ["JAX_TRITON_DUMP_DIR"] = str(FOLDER)  # read when the first kernel is lowered
    ways = [("bfloat16", False), ("float32", True)][: 2 if len(sys.argv) > 3 else 1]
    for capability, way in itertools.product(map(int, sys.argv[2:]), ways):
        for name, (function, *arguments) in cases(*way).items():
            row = compiled(name, function, *arguments, capability=capability)
            print(json.dumps(row | {"case": f"{name} sm_{capability} {way}"}), flush=True)


if __name__ == "__main__":
    main()
