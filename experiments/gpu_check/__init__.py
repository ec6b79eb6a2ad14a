"""Everything that jaxmem claims of a GPU, measured on one: python -m experiments.gpu_check --out
DIR [--part NAME].
"""
