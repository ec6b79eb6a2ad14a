"""Run by test_typed.py: operations of arrays that eight CPUs share, whose types say how, as
TPUs are given them; a line of JSON a case.

    python -m tests.kernels.typed
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmem import codecs
from jaxmem_kernels import bits, int4, ops
from jaxmem_kernels.partition import GROUPED, as_typed
from tests.kernels.partitioned import SPECS
from tests.kernels.values import equal, hard

SHAPE, GROUP = (8, 16, 1024), 64
HOW = {"group": GROUP, "scale": "bfloat16", "stochastic": False}
BACK = {"width": SHAPE[-1], "dtype": "float32"}


def main() -> None:
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
    with jax.set_mesh(mesh):
        for name, spec in SPECS.items():
            every(name, jax.device_put(hard(SHAPE, "float32", GROUP), spec))
    # Groups that the axes of a mesh divide in part alone: eight and two devices, twelve groups.
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    with jax.set_mesh(mesh):
        every(
            "in part", jax.device_put(hard((8, 16, 192), "float32", GROUP), SPECS["batch, width"])
        )

    with jax.set_mesh(mesh):
        for_tpus()


def for_tpus() -> None:
    """How many kernels stand in programs that are lowered for TPUs, of codecs and of operations
    whose operands are divided apart.
    """
    there_and_back = lambda codec: lambda x: codec.decode(codec.encode(x), x.shape, x.dtype)
    twelve_groups = array((16, 1024, 768), P("data", None, "model"))
    for codec in (
        codecs.GroupedSymmetric(),
        codecs.GroupedAsymmetric(),
        codecs.ChannelwiseSymmetric(),
    ):
        lowered(f"{codec.name} in part", there_and_back(codec), twelve_groups)
    flags = array((16, 1024, 3072), P("data", None, "model"), bool)
    lowered("bit_mask in part", there_and_back(codecs.BitMask()), flags)
    tokens = array((1024, 1024), P("data", None))
    lowered("naive_per_token", there_and_back(codecs.NaivePerToken()), tokens)
    codes, scales = array((1024, 16, 32), P("data"), "uint8"), array((1024, 16), P())
    back = lambda dtype: lambda *given: ops.dequantize(*given, width=1024, dtype=dtype)
    lowered("codes apart from scales", back("bfloat16"), codes, scales)
    with jax.enable_x64(True):
        lowered("float64", back("float64"), codes, scales)


def array(shape, spec, dtype: Any = "bfloat16"):
    return jax.device_put(jnp.zeros(shape, dtype), spec)


def lowered(case: str, function, *arrays) -> None:
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    print(json.dumps({"case": case, "kernels": text.count("tpu_custom_call")}), flush=True)


def every(case: str, x) -> None:
    row = P(jax.typeof(x).sharding.spec[-1])
    width = x.shape[-1]
    scales = jax.device_put(1 + jnp.arange(width, dtype=jnp.float32), row)
    back = BACK | {"width": width}
    by = {"group": GROUP, "stochastic": False}
    codes = one(case, int4.quantize, ops._encoding(1), (x,), HOW)
    one(case, int4.dequantize, ops._decoding(("k",)), codes, back)
    codes = one(case, int4.quantize_by, ops._encoding(0, channels=True), (x, scales), by)
    one(case, int4.dequantize_by, ops._decoding((GROUPED,)), (*codes, scales), back)
    codes = one(case, bits.pack_bits, ops._packing, (x, jnp.float32(0)), {"group": GROUP})
    ends = jnp.float32(0), jnp.float32(1)
    one(case, bits.unpack_bits, ops._unpacking, (*codes, *ends), {"width": width})


def one(case: str, reference, rule_of, arrays, params) -> tuple:
    """The results of the reference where devices run it on their parts, after it was reported
    whether they are those of whole arrays, and how the first of them is divided.
    """
    several = lambda found: found if isinstance(found, tuple) else (found,)

    def divided(*arrays):
        avals = [jax.typeof(a) for a in arrays]
        rule = rule_of(*avals, **params)
        part = lambda *own: several(reference(*own, **params | rule.of_part(params, own)))
        typed = as_typed(rule, avals)
        assert typed is not None, "all axes are explicit"
        shapes = [own.shape for own in typed.parts]

        def checked(*own):
            assert [a.shape for a in own] == shapes
            return part(*own)

        return typed.over(checked)(*arrays)

    found = jax.jit(divided)(*arrays)
    whole = [jnp.asarray(jax.device_get(a)) for a in arrays]
    wanted = several(jax.jit(lambda *a: reference(*a, **params))(*whole))
    parts = found[0].size // found[0].addressable_shards[0].data.size
    row = {"case": f"{reference.__name__} {case}", "equal": equal(found, wanted), "parts": parts}
    print(json.dumps(row), flush=True)
    return found


if __name__ == "__main__":
    main()
