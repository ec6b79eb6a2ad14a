"""Measures jaxmem's claims about GPUs and TPUs on a device, and writes a file of results for each
part: python -m experiments.gpu_check --out DIR [--part NAME].
"""
