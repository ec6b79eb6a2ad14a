"""The settings of each kind of experiment, as the TOML files of `configs/` set them. Imports only
`experiments.errors`.
"""
