"""Federated learning on Flower: `compress`, a mod for clients, and `Compressed`, a wrapper for strategies."""
