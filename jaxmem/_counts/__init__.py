"""How many layers do what, and where their states lie: one program for both. Free of JAX."""
