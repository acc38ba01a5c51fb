"""The packet that workers and the aggregator exchange (docs/aggregator.md)."""
