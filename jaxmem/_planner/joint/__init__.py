"""The search over actions and placements of states together."""
