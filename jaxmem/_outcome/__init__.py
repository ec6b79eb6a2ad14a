"""Makes of a finished search what the user gets: a plan with its table and curve, or an error."""
