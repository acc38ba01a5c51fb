"""What clients and the server both use: the bytes of updates and downloads, and the conversion of Flower's arrays."""
