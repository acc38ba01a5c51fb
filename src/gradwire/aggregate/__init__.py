"""How frames meet: the only place that calls collectives."""
