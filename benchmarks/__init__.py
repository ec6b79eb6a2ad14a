"""Scripts that measure what the project claims: `python -m benchmarks.NAME` writes
benchmarks/results/NAME.json.
"""
