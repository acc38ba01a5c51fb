"""What the client and the server share: updates and models as bytes, and the notes between them."""
