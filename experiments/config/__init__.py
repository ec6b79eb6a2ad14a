"""What a TOML file of `configs/` may say, by kind of experiment. Imports `experiments.errors`
alone.
"""
