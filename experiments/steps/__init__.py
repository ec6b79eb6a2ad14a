"""Training steps: states, optimizers, and the accumulation of microbatches. Imports `models`."""
