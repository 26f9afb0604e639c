"""What turns tensors into the bytes that travel: a codec, a file."""
