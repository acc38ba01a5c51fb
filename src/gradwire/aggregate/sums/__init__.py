"""Sums of integer words on their way (docs/homomorphic.md): over a process group, or by the aggregator."""
