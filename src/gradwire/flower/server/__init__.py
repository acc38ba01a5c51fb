"""The server's side: any Flower strategy, over a grid that encodes models and decodes replies. It imports `shared`
only."""
