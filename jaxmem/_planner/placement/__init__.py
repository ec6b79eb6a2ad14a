"""The mixed-integer program over placements: how many layers take which actions, and where their
states are stored. This part imports no JAX.
"""
