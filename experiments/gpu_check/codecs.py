"""Speed of every codec: bytes of the tensor per second, encoding and decoding, each as one program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxmem
from experiments.gpu_check.measure import normal, quartiles, seconds_of
from experiments.gpu_check.settings import Settings

SHAPES = ((8, 1024, 768), (8, 1024, 3072), (8, 1024, 4096), (8, 12, 1024, 1024))
TINY = ((2, 64, 32),)
DTYPES = ("bfloat16", "float32")


def codecs() -> dict[str, jaxmem.codecs.Codec]:
    """Every public codec with its defaults, by name."""
    classes: list[Any] = [
        c for c in vars(jaxmem.codecs).values() if dataclasses.is_dataclass(c) and isinstance(c, type)
    ]
    return {codec.name: codec for codec in sorted((c() for c in classes), key=str)}


def cases(settings: Settings) -> dict[str, tuple]:
    found = {}
    for name, codec in codecs().items():
        for shape in TINY if settings.small else SHAPES:
            for dtype in ("bool",) if name == "bit_mask" else DTYPES:
                found[f"{name} {'x'.join(map(str, shape))} {dtype}"] = codec, shape, jnp.dtype(dtype)
    return found


def points(settings: Settings) -> list[str]:
    return list(cases(settings))


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    codec, shape, dtype = cases(settings)[point]
    x = normal(shape, jnp.float32) > 0 if dtype == jnp.bool_ else normal(shape, dtype)
    encode = jax.jit(codec.encode)
    decode = jax.jit(lambda codes: codec.decode(codes, shape, dtype))
    codes = encode(x)
    encoding, decoding = seconds_of(lambda: encode(x)), seconds_of(lambda: decode(codes))
    whole, part = x.nbytes, sum(c.nbytes for c in codes)
    error = jnp.abs(decode(codes).astype(jnp.float32) - x.astype(jnp.float32)).max()
    return {
        "codec": str(codec),
        "tensor_bytes": whole,
        "code_bytes": part,
        "code_bytes_as_said": codec.nbytes(shape, dtype),
        "encode_seconds": quartiles(encoding),
        "decode_seconds": quartiles(decoding),
        "encode_bytes_per_second": quartiles([whole / s for s in encoding]),
        "decode_bytes_per_second": quartiles([whole / s for s in decoding]),
        "largest_error": float(error),
    }


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    """Lowest and highest median of each codec, GB/s of the tensor."""
    found = {}
    for name in codecs():
        own = [row for point, row in rows.items() if point.split()[0] == name]
        both = {w: [row[f"{w}_bytes_per_second"]["median"] / 1e9 for row in own] for w in ("encode", "decode")}
        found[name] = {f"{w}_gigabytes_per_second": [min(r), max(r)] for w, r in both.items() if r}
    return found
