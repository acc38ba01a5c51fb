"""The client: the mod, its error memory and where that is kept, and byte budgets."""
