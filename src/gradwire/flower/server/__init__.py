"""The server: any Flower strategy, over a grid that encodes models and decodes replies."""
