"""How a tensor is held in fewer bytes. Imports `_core` and the kernels."""
