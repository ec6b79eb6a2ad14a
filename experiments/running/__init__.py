"""Runs experiments: plans, trains, records and shows results. Imports `steps` and the packages that
`steps` imports.
"""
