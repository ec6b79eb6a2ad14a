"""Makes the plan, with its table and its curve, or the error of a finished search."""
