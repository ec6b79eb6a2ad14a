"""Training steps: states, optimizers, and how microbatches become one step. Imports `models`."""
