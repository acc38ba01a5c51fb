"""Probability models: what symbols cost, independent of the coder that spends the bits."""
