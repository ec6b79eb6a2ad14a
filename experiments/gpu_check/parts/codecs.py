"""Speed of every codec, as `kernels.bench` measures it, and that the device's codes are the
reference's bit for bit.
"""

import functools

import jax
import jax.numpy as jnp

from experiments.gpu_check.measure import normal
from experiments.gpu_check.settings import Settings
from jaxmem_kernels import references
from kernels import bench

EQUAL = "equals its reference: "
SHAPE, TINY = (4096, 4096), (64, 1024)


def points(settings: Settings) -> list[str]:
    return [*(EQUAL + name for name in bench.CODECS), *bench.points(settings.small)]


def measure(point: str, settings: Settings, rows: dict[str, dict]) -> dict:
    if not point.startswith(EQUAL):
        return bench.measure(point)
    return equality(point.removeprefix(EQUAL), TINY if settings.small else SHAPE)


def equality(name: str, shape: tuple[int, ...]) -> dict:
    """How many bytes of codes, and of decoded values, differ between the device's kernels and its
    references.
    """
    codec = bench.CODECS[name]
    x = normal(shape, jnp.bfloat16).at[:, 7].multiply(50)
    x = x > 0 if name == "bit_mask" else x
    both = lambda x: (codes := codec.encode(x), codec.decode(codes, x.shape, x.dtype))
    kernel = jax.jit(both)(x)
    with references():
        reference = jax.jit(functools.partial(both))(x)
    differ = [
        int((a != b).sum()) for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(reference))
    ]
    return {"codec": str(codec), "shape": list(shape), "values": x.size, "differ": differ}


def summary(rows: dict[str, dict], settings: Settings) -> dict:
    """The table, and of each codec the share of a copy's rate at the largest size and the least
    size at which kernels pay.
    """
    measured = {point: row for point, row in rows.items() if "of_copy" in row}
    found: dict = {"table": bench.table(list(measured.values())).splitlines()}
    for name in bench.CODECS:
        for way in bench.WAYS:
            own = [
                row for point, row in measured.items() if point.rsplit(" ", 1)[0] == f"{name} {way}"
            ]
            if own:
                pays = [row["values"] for row in own if row["of_reference"] < 1]
                found[f"{name} {way}"] = {
                    "of_copy": own[-1]["of_copy"],
                    "pays_from": min(pays, default=None),
                }
    seconds = lambda name, way: [
        r["seconds"] for p, r in measured.items() if p.rsplit(" ", 1)[0] == f"{name} {way}"
    ]
    plain = {way: seconds("grouped_symmetric", way) for way in bench.WAYS}
    for name in ("grouped_symmetric stochastic", "outlier_separated"):
        pairs = {way: [a / b for a, b in zip(seconds(name, way), plain[way])] for way in bench.WAYS}
        found[f"{name}, times grouped_symmetric's seconds"] = pairs
    found["differ"] = {point: sum(row["differ"]) for point, row in rows.items() if "differ" in row}
    return found
