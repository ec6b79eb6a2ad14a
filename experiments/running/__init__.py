"""Runs experiments: plans, trains, records and shows results. Imports `steps` and all packages that
`steps` imports.
"""
