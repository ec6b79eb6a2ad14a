"""Kernels for TPUs in Pallas, each beside a reference of the package above."""
