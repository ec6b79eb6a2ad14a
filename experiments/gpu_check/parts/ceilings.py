"""Measures the device's peak rates: copies, matrix products, the host link each way and both ways
at once, and a codec.
"""

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import jaxmem
from experiments.gpu_check.measure import normal, quartiles, seconds_of
from experiments.gpu_check.settings import Settings

COPY_BYTES, LINK_BYTES, SIDE = 2**31, 2**29, 8192
PRODUCTS = {
    "bfloat16": (jnp.bfloat16, None),
    "float32": (jnp.float32, None),
    "float32_highest": (jnp.float32, "highest"),
}
CODEC, CODEC_SHAPE = jaxmem.codecs.GroupedSymmetric(), (8192, 8192)
WAYS = ("to_host", "to_device", "both")


def points(settings: Settings) -> list[str]:
    products, links = (f"matmul_{name}" for name in PRODUCTS), (f"link_{way}" for way in WAYS)
    return ["copy", *products, *links, "codec_encode", "codec_decode"]


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    what, _, name = point.partition("_")
    small = 2**10 if settings.small else 1
    if what == "copy":
        return copy(COPY_BYTES // small)
    if what == "matmul":
        dtype, precision = PRODUCTS[name]
        return matmul(dtype, precision, SIDE // (64 if settings.small else 1))
    if what == "codec":
        return codec(name, tuple(n // (64 if settings.small else 1) for n in CODEC_SHAPE))
    return link(name, LINK_BYTES // small)


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    return {
        point: row.get("rate", {}).get("median", row.get("absent")) for point, row in rows.items()
    }


def copy(size: int) -> dict:
    """Measures B/s of reading an array and writing another; both arrays count."""
    x = normal((size // 4,), jnp.float32)
    step = jax.jit(lambda x: x + 1)
    return rates([2 * size / s for s in seconds_of(lambda: step(x))], "B/s, read and written")


def matmul(dtype, precision: str | None, side: int) -> dict:
    """Measures FLOP/s of a square matrix product. XLA's default for float32 may be TF32; the
    precision "highest" is float32.
    """
    a, b = (normal((side, side), dtype, seed) for seed in (0, 1))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return rates([2 * side**3 / s for s in seconds_of(lambda: product(a, b))], "FLOP/s")


def link(way: str, size: int) -> dict:
    """Measures B/s between device memory and pinned host memory. For both ways at once, the result
    is B/s of one way.
    """
    device = jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        return {"absent": f"no pinned host memory, only {', '.join(sorted(kinds))}"}
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    here = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    on_device = jax.device_put(normal((size // 4,), jnp.float32), here)
    on_host = jax.device_put(normal((size // 4,), jnp.float32, 1), host)
    out, back = lambda: jax.device_put(on_device, host), lambda: jax.device_put(on_host, here)
    run = {"to_host": out, "to_device": back, "both": lambda: (out(), back())}[way]
    return rates([size / s for s in seconds_of(run)], "B/s")


def codec(way: str, shape: tuple[int, ...]) -> dict:
    """Measures B/s, read and written, of encoding or decoding a bfloat16 tensor."""
    x, encode = normal(shape, jnp.bfloat16), jax.jit(CODEC.encode)
    codes, decode = encode(x), jax.jit(lambda codes: CODEC.decode(codes, shape, jnp.bfloat16))
    moved = x.nbytes + sum(c.nbytes for c in codes)
    run = {"encode": lambda: encode(x), "decode": lambda: decode(codes)}[way]
    return rates([moved / s for s in seconds_of(run)], "B/s, read and written")


def rates(values: list[float], unit: str) -> dict:
    return {"rate": quartiles(values), "unit": unit}
