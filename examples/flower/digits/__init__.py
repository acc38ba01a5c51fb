"""Flower's PyTorch quickstart on small images, with gradwire."""
