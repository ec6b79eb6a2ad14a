"""Packing and quantization of arrays, as references in jax.numpy: what a kernel of the same name has to compute."""

from jaxmem_kernels.bits import pack_bits as pack_bits
from jaxmem_kernels.bits import unpack_bits as unpack_bits
from jaxmem_kernels.int4 import dequantize as dequantize
from jaxmem_kernels.int4 import dequantize_offset as dequantize_offset
from jaxmem_kernels.int4 import pack_int4 as pack_int4
from jaxmem_kernels.int4 import quantize as quantize
from jaxmem_kernels.int4 import quantize_offset as quantize_offset
from jaxmem_kernels.int4 import unpack_int4 as unpack_int4
from jaxmem_kernels.int4 import wide_dtype as wide_dtype
from jaxmem_kernels.layout import from_parts as from_parts
from jaxmem_kernels.layout import from_rows as from_rows
from jaxmem_kernels.layout import part_shape as part_shape
from jaxmem_kernels.layout import row_shape as row_shape
from jaxmem_kernels.layout import to_parts as to_parts
from jaxmem_kernels.layout import to_rows as to_rows
from jaxmem_kernels.rounding import NEAREST as NEAREST
from jaxmem_kernels.rounding import STOCHASTIC as STOCHASTIC
from jaxmem_kernels.rounding import Rounding as Rounding
from jaxmem_kernels.rounding import round_up as round_up
