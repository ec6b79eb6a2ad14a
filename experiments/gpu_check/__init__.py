"""Everything that jaxmem claims of a GPU, or of a TPU, measured on one:
python -m experiments.gpu_check --out DIR [--part NAME].
"""
