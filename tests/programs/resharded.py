"""A state that is saved over some devices and read over others, divided otherwise and in another
memory. It needs 4 devices, and prints how many readings were compared: each way against every
other, or every so many of them.

    python -m tests.shared.worker tests.programs.resharded FOLDER [EVERY]
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem._train.checkpoints.checkpoints import Checkpoints
from jaxmem._train.checkpoints.stored import shape

VALUES = {
    "float": np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32),
    "half": np.arange(96).reshape(8, 12).astype(jnp.bfloat16),
    "small": (np.arange(96).reshape(8, 12) % 7).astype(jnp.int4),
    "flags": np.arange(96).reshape(8, 12) % 3 == 0,
}
# devices, the axes that they divide, and the memory
WAYS = [
    (devices, axes, kind)
    for devices in (1, 2, 4)
    for axes in ((), ("x",), (None, "x"))
    for kind in ("device", "pinned_host")
]


def state(devices: int, axes: tuple, kind: str) -> dict:
    mesh = jax.sharding.Mesh(jax.devices()[:devices], "x", axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P(*axes), memory_kind=kind)
    arrays = {name: jax.device_put(value, place) for name, value in VALUES.items()}
    whole = NamedSharding(mesh, P())
    return arrays | {
        "key": jax.device_put(jax.random.key(3), whole),
        "weak": jax.device_put(jnp.asarray(1.5), whole),
        "empty": jax.device_put(jnp.zeros((0, 4)), place),
        "free": jnp.arange(3),
        "number": 7,
    }


def same(got, want) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(y, int):
            assert x == y
            continue
        assert (x.dtype, x.committed) == (y.dtype, y.committed)
        assert getattr(x, "weak_type", None) == getattr(y, "weak_type", None)
        assert x.sharding == y.sharding, (x.sharding, y.sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def main(folder: str, every: str = "1") -> dict:
    compared = 0
    for number, way in enumerate(WAYS):
        with Checkpoints(pathlib.Path(folder, str(number)), 1) as checkpoints:
            checkpoints.save(1, state(*way), {})
            found = checkpoints.newest()
            for other in WAYS[number % int(every) :: int(every)]:
                want = state(*other)
                same(found.state(jax.tree.map(shape, want)), want)
                same(found.state(want), want)
                compared += 2
    return {"compared": compared, "ways": len(WAYS)}
