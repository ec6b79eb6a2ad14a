"""Scripts that measure what the project claims: `python -m benchmarks.NAME`, each writing benchmarks/results/NAME.json."""
