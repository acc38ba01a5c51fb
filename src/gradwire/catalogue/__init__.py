"""Recipes: the list of all of them, how specs are read, and one byte budget for a whole model."""
