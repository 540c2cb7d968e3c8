"""Documents: where they come from, as tokens, and how well a model predicted them."""
