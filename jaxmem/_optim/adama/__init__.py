"""AdamA: its arithmetic, and the optax transformations."""
