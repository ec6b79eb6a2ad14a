"""Tags, and the checkpoint policies that carry a plan's actions to them."""
