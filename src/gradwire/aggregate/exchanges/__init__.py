"""The exchanges of a training step: all-reduce, all-gather, scatter-reduce, hierarchical."""
