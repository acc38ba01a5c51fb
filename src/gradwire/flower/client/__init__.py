"""The client's side: the mod, its error memory and where that is stored, and byte budgets. It imports `shared` only."""
