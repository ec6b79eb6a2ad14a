"""What the scripts of `benchmarks/` share. Imports jaxmem, its private files too, and
`experiments`.
"""
