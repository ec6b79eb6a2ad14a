"""Makes the plan of a finished search, with its table and its curve."""
