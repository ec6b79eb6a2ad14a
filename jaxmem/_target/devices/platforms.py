"""What plans depend on that is not the same on every platform, as data.

Code outside the room `_target` asks a `Platform` for a fact, and never for a platform's name, so
that support for another platform is a row of this table.
"""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Platform:
    """The facts of one platform.

    host_is_apart: whether host memory is another memory than the device's, and copies between the
      two can overlap with compute.
    offloads_unrolled: whether XLA moves to host memory the offloaded tensors of layers that no loop
      repeats.
    offloads_nested: whether XLA compiles offloaded tensors that a loop in a loop stacks. libtpu of
      JAX 0.10.2 and 0.11.2 does not.
    tiled: whether arrays take the bytes of whole tiles.
    cheap_random_bits: whether threefry's bits are written once, and not as dozens of arrays.
    as_gpu: whether XLA fuses and schedules as for a GPU, which liveness estimates follow.
    overlap: the share of a layer's work that runs beside the layer's copies to host memory and
      back. XLA:GPU waits for a copy in the iteration that starts it, mostly after one product.
    """

    host_is_apart: bool = True
    offloads_unrolled: bool = True
    offloads_nested: bool = True
    tiled: bool = False
    cheap_random_bits: bool = True
    as_gpu: bool = False
    overlap: float = 1.0


class OnPlatform(Protocol):
    """A target, or a device of JAX."""

    @property
    def platform(self) -> str: ...


# Remove with a fix: `offloads_nested` (AI-Hypercomputer/maxtext #4995), and `offloads_unrolled`.
PLATFORMS = {
    "cpu": Platform(host_is_apart=False),
    "cuda": Platform(offloads_unrolled=False, offloads_nested=False, as_gpu=True, overlap=0.25),
    "rocm": Platform(),
    "tpu": Platform(offloads_nested=False, tiled=True, cheap_random_bits=False),
}


def platform_of(name: str) -> Platform:
    """The facts of a platform, by JAX's name for it; the defaults for a platform of a plugin."""
    return PLATFORMS.get(name, Platform())
