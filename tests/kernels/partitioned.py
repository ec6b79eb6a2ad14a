"""Run by test_partitioned.py: codecs of tensors that eight GPUs share, compiled without a GPU; a
line of JSON each.

python -m tests.shared.worker tests.kernels.partitioned [every | awkward]
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_kernels as jk
from jaxmem import codecs
from tests.shared import deviceless

SHAPE = (8, 512, 2048)
SPECS = {
    "batch": P(("data", "model")),
    "batch, width": P("data", None, "model"),
    "batch, sequence": P("data", "model"),
    "width": P(None, None, ("model", "data")),
}
# a group a row, a device's part within a group, groups that axes fit in part, a last group that is
# short
AWKWARD = {
    (8, 12, 512, 64): P("data"),
    (512, 1024, 128): P(None, None, "model"),
    (256, 512, 384): P("data", None, "model"),
    (2**20 + 8,): P("data"),
}
CODECS = (
    codecs.GroupedSymmetric(),
    codecs.GroupedAsymmetric(stochastic=True),
    codecs.ChannelwiseSymmetric(),
    codecs.OutlierSeparated(),
    codecs.BitMask(),
)
_COLLECTIVE = re.compile(
    r"= (\(?\w+\[.*?) (?:all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\("
)
_ITEM = {"bf16": 2, "f32": 4, "u8": 1, "s32": 4, "u32": 4, "pred": 1}


def collectives(text: str) -> list[int]:
    """Bytes of each collective's result, or of the largest of its results."""
    found = []
    for shapes in _COLLECTIVE.findall(text):
        size = lambda dims: int(np.prod([int(n) for n in dims.split(",") if n]))
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        found.append(max(_ITEM[kind] * size(dims) for kind, dims in arrays))
    return found


def main(which: str = "") -> None:
    mesh = Mesh(np.array(deviceless.devices(count=8)).reshape(2, 4), ("data", "model"))
    for number, codec in enumerate(CODECS):
        if which == "awkward":
            for shape, spec in AWKWARD.items():
                report(codec, "awkward", shape, NamedSharding(mesh, spec))
        else:
            # A tensor's axes are divided alike for all codecs; what lies beside it is not.
            every = number == 0 or which == "every"
            for name, spec in SPECS.items():
                if every or name == "batch, width":
                    report(codec, name, SHAPE, NamedSharding(mesh, spec))


def report(codec, name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    dtype = jnp.dtype(bool if isinstance(codec, codecs.BitMask) else "bfloat16")

    def there_and_back(x):
        def layer(carry, _):
            codes = codec.encode(jnp.sin(carry) if carry.dtype != bool else ~carry)
            return codec.decode(codes, carry.shape, carry.dtype), codes

        return jax.lax.scan(layer, x, None, length=3)

    with jk.compiling_for(90):
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        text = jax.jit(there_and_back).lower(x).compile().as_text()
    row = {"codec": codec.name, "spec": name, "collectives": collectives(text)}
    row["kernels"] = len(re.findall(r"custom-call\(.*?triton_kernel_call", text))
    row["shard"] = int(np.prod(shape)) * dtype.itemsize // 8
    print(json.dumps(row), flush=True)
