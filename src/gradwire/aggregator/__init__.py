"""The aggregator: a program that adds up what workers send (docs/aggregator.md)."""
