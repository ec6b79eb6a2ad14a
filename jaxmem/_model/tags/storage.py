"""How a choice stores a tensor between its forward and its backward: the arrays that are stored,
and the memory of each array.

The tag's rule calls `Storage` to encode and to decode, and the profile prices the arrays of the
same `Storage`. An action that encodes without a codec of the choice gets its codec in `codec_of`.
"""

import jax

from jaxmem._core.actions import Choice
from jaxmem._model.codecs.base import Codec
from jaxmem._model.codecs.registry import parse
from jaxmem._model.tags.primitive import differentiable_once

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

TWICE = (
    "remat_policy: a gradient of a gradient runs through a compressed tag, and codes have no"
    " derivative; plan such a step with actions=jaxmem.plans.LOSSLESS"
)


def codec_of(choice: Choice) -> Codec | None:
    """The codec whose codes a choice stores; None if the choice stores the tensor itself."""
    return None if choice.codec is None else parse(choice.codec)


class Storage:
    """A policy's answer for a tag whose tensor is encoded, offloaded, or both. The tag's rule calls
    `encode` in the forward and `decode` in the backward.
    """

    def __init__(self, choice: Choice):
        self._offloads, self._form = choice.action.offloads, codec_of(choice)

    def encode(self, x):
        """Returns the arrays that are stored for the backward in place of `x`, in their memory."""
        form = self._form
        codes = (x,) if form is None else form.encode(differentiable_once(x, TWICE))
        return tuple(self._moved(code, DEVICE, HOST) for code in codes)

    def decode(self, codes, shape, dtype):
        """Returns the decoded tensor, of this shape and dtype, on the device."""
        form = self._form
        codes = tuple(self._moved(code, HOST, DEVICE) for code in codes)
        return codes[0] if form is None else form.decode(codes, shape, dtype)

    def moves(self, code) -> bool:
        """Whether an array of codes or scales, or the tensor itself, is stored in host memory.

        Codes and scales with a single axis, such as a scale for each channel, are not: their copy
        would cost more than their bytes, and libtpu 0.0.42 and 0.0.48 crash if a loop moves such an
        array of 16 bits.
        """
        return self._offloads and (self._form is None or len(code.shape) > 1)

    def _moved(self, code, source, to):
        """Moves an array from one memory to another, if the array is stored in host memory."""
        return jax.device_put(code, to, src=source) if self.moves(code) else code
