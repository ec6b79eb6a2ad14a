"""The public names of `jaxmem_kernels`, each imported from the file that defines it. This file
imports JAX.
"""

from jaxmem_kernels.capability import abstract_devices as abstract_devices
from jaxmem_kernels.capability import compiling_for as compiling_for
from jaxmem_kernels.capability import references as references
from jaxmem_kernels.channels import quantize_channelwise as quantize_channelwise
from jaxmem_kernels.channels import quantize_separated as quantize_separated
from jaxmem_kernels.dispatch import has_gpu_kernel as has_gpu_kernel
from jaxmem_kernels.dispatch import reference_of as reference_of
from jaxmem_kernels.layout import as_rows as as_rows
from jaxmem_kernels.layout import channels_of as channels_of
from jaxmem_kernels.layout import fitted as fitted
from jaxmem_kernels.layout import folded as folded
from jaxmem_kernels.layout import undivided as undivided
from jaxmem_kernels.ops import dequantize as dequantize
from jaxmem_kernels.ops import dequantize_by as dequantize_by
from jaxmem_kernels.ops import dequantize_offset as dequantize_offset
from jaxmem_kernels.ops import dequantize_with as dequantize_with
from jaxmem_kernels.ops import pack_bits as pack_bits
from jaxmem_kernels.ops import quantize as quantize
from jaxmem_kernels.ops import quantize_by as quantize_by
from jaxmem_kernels.ops import quantize_offset as quantize_offset
from jaxmem_kernels.ops import quantize_without as quantize_without
from jaxmem_kernels.ops import unpack_bits as unpack_bits
from jaxmem_kernels.rounding import greatest as greatest
from jaxmem_kernels.rounding import scale_of as scale_of
from jaxmem_kernels.rounding import wide_dtype as wide_dtype
