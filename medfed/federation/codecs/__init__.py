"""What turns tensors into the bytes that travel."""
