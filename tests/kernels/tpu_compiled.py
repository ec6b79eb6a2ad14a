"""Run by test_tpu_compiled.py: every kernel compiled for TPUs that are not there; a line of JSON a
program.

    python -m tests.shared.worker tests.kernels.tpu_compiled TPU...
    python -m tests.shared.worker tests.kernels.tpu_compiled codes TPU

A TPU is such as v5e; of several, more shapes are compiled. With `codes`, the arrays of codes of
every codec are compiled alone.
"""

from tests.shared import tpus  # isort: skip  (before any device is asked for)

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem_kernels as jk
from jaxmem import codecs
from tests.kernels.partitioned import SHAPE, SPECS, collectives

WIDE, HEADS, LONG = (4096, 1024), (4, 12, 1024, 64), (2, 1024, 2304)
TWO_EXPLICIT = (AxisType.Explicit, AxisType.Explicit)
SYMMETRIC = codecs.GroupedSymmetric()
CODECS = (
    SYMMETRIC,
    codecs.GroupedSymmetric(stochastic=True, scale="float32", group=128),
    codecs.GroupedAsymmetric(),
    codecs.ChannelwiseSymmetric(stochastic=True),
    codecs.OutlierSeparated(),
    codecs.BitMask(),
)


def spec(shape, dtype="bfloat16", sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def report(case: str, program, **more) -> None:
    text = program if isinstance(program, str) else program.as_text()
    kernels = text.count("@tpu_custom_call") + text.count('custom_call_target="tpu_custom_call"')
    print(json.dumps({"case": case, "kernels": kernels} | more), flush=True)


def both_ways(codec, shape, dtype: str, name: str) -> None:
    """Encodes and decodes in one program. Where the codes that it returns lie as a step lets them,
    how many bytes do they take, beside what the codec says?
    """
    x = spec(shape, "bool" if isinstance(codec, codecs.BitMask) else dtype)

    def there_and_back(x):
        codes = codec.encode(x)
        return codes, codec.decode(codes, shape, x.dtype)

    program = tpus.compiled(there_and_back, [x], name, free=(False, True))
    tiled = program.memory_analysis().output_size_in_bytes - x.size * x.dtype.itemsize
    share = tiled / codec.nbytes(shape, x.dtype)
    report(f"{name} {codec} {x.dtype}{list(shape)}", program, share=share)


def encoded(name: str, cases) -> None:
    """How many bytes codes take that are written alone; cases: codecs and shapes."""
    for codec, shape in cases:
        x = spec(shape)
        program = tpus.compiled(codec.encode, [x], name, free=(False, True))
        share = program.memory_analysis().output_size_in_bytes / codec.nbytes(shape, x.dtype)
        report(f"{name} {codec} bytes of {list(shape)}", program, share=share)


def readings(name: str) -> None:
    """How often encoding reads a tensor by channels: as many of the program's operations do. What
    is copied between memories beside them is not counted, since that is one of these readings.
    """
    for codec in (codecs.ChannelwiseSymmetric(), codecs.OutlierSeparated()):
        for shape in (WIDE, LONG):
            program = tpus.compiled(codec.encode, [spec(shape)], name, free=(False, True))
            body = program.as_text().split("ENTRY", 1)[1]
            # An operand's shape stands where it is made: views and copies have the tensor's.
            size = f"bf16[{','.join(map(str, shape))}]"
            names = re.findall(rf"(%[\w.-]+) = \(?{re.escape(size)}", body)
            names += re.findall(rf"(%[\w.-]+) = bf16\[1,{','.join(map(str, shape))}\]", body)
            reads = [
                line
                for line in body.splitlines()
                if not re.search(r" (bitcast|copy-start|copy-done)\(", line)
                and {*names} & {*re.findall(r"%[\w.-]+", line.split("=", 1)[-1])}
            ]
            report(f"readings by {codec.name} of {list(shape)}", program, readings=len(reads))


def wrapped(name: str) -> None:
    """A kernel inside of what steps are made of."""
    x, encode = spec((3, 2048, 512)), SYMMETRIC.encode
    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    over = {"mesh": one, "in_specs": P("data"), "out_specs": P("data")}
    inside = {
        "scan": lambda x: jax.lax.scan(lambda c, row: (c, encode(row)), 0, x)[1],
        "vmap": jax.vmap(encode),
        "checkpoint": jax.grad(
            jax.checkpoint(lambda x: (x * encode(x)[1].sum()).sum().astype("float32"))
        ),
        "shard_map": jax.shard_map(encode, **over),
        "shard_map, unchecked": jax.shard_map(encode, **over, check_vma=False),
    }
    for case, function in inside.items():
        report(case, tpus.compiled(function, [x], name))


def without() -> None:
    """What takes references, and what kernels do not take. XLA takes half a minute to compile a
    flat tensor's reference, so that these are not compiled.
    """
    with jk.references():
        report("references", exported(spec(WIDE)))
    cases = {
        "few values": spec((128, 256)),
        "few tokens": spec((2048, 2, 256)),
        "float16": spec(WIDE, "float16"),
        "flat": spec((2**20,)),
        "a short last group": spec((4096, 100)),
    }
    for case, x in cases.items():
        report(case, exported(x))


def exported(x) -> str:
    return jax.export.export(jax.jit(SYMMETRIC.encode), platforms=["tpu"])(x).mlir_module()


def divided(name: str) -> None:
    """Four TPUs that share a tensor, by XLA's partitioner and by `shard_map`."""
    mesh = Mesh(np.array(tpus.devices(name, 4)), ("data",), axis_types=(AxisType.Auto,))
    x = spec(WIDE, sharding=NamedSharding(mesh, P("data")))
    mapped = jax.shard_map(SYMMETRIC.encode, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    report("divided", jax.jit(SYMMETRIC.encode).lower(x).compile())
    report("divided by shard_map", jax.jit(mapped).lower(x).compile())


def typed(name: str) -> None:
    """Eight TPUs that share a tensor whose type says how."""
    mesh = Mesh(
        np.array(tpus.devices(name, 8)).reshape(2, 4), ("data", "model"), axis_types=TWO_EXPLICIT
    )
    cases = {
        SYMMETRIC: SPECS,
        codecs.ChannelwiseSymmetric(): ("batch, sequence", "width"),
        codecs.OutlierSeparated(): ("batch", "batch, sequence"),
        codecs.BitMask(): ("batch, width",),
    }
    for codec, names in cases.items():
        dtype = jnp.dtype(bool if isinstance(codec, codecs.BitMask) else "bfloat16")
        there_and_back = lambda x, codec=codec: codec.decode(codec.encode(x), x.shape, x.dtype)
        jitted = jax.jit(there_and_back)
        for how in names:
            x = spec(SHAPE, dtype, NamedSharding(mesh, SPECS[how]))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                text = jitted.lower(x).compile().as_text()
            shard = int(np.prod(SHAPE)) * dtype.itemsize // 8
            report(f"typed {codec.name}, {how}", text, collectives=collectives(text), shard=shard)
    # What is exported knows no devices, and is divided as its types say all the same.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        x = spec(SHAPE, sharding=NamedSharding(mesh.abstract_mesh, SPECS["batch, width"]))
        report("typed, exported", exported(x))
        narrow = x.sharding.update(spec=P(None, ("data", "model")))
        part = spec((8, 256, 2048), sharding=narrow)
        report("typed, a part that no kernel takes", exported(part))


def main(*names: str) -> None:
    grouped = CODECS[:-1]
    fit = lambda codec, shape: shape[-1] % codec.group == 0
    if names[0] == "codes":
        every = [(c, s) for c in grouped for s in (WIDE, HEADS, LONG) if fit(c, s)]
        return encoded(names[1], every)
    for name in names:
        for codec in CODECS:
            both_ways(codec, WIDE, "bfloat16", name)
            if len(names) > 1 and codec in grouped:
                for shape, dtype in ((WIDE, "float32"), (LONG, "bfloat16")):
                    both_ways(codec, shape, dtype, name)
                if fit(codec, HEADS):
                    both_ways(codec, HEADS, "bfloat16", name)
    if len(names) == 1:
        # That of outliers takes as long to compile as all others.
        heads = [(c, HEADS) for c in grouped[:-1] if fit(c, HEADS)]
        encoded(names[0], [(SYMMETRIC, LONG), *heads])
        readings(*names)
        wrapped(*names)
        without()
        divided(*names)
        typed(*names)
    return None
