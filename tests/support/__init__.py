"""What several tests share: ranks, tensors, plain decoders, an aggregator in a thread, Flower apps."""
