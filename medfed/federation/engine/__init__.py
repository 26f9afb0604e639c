"""The only training loop: the local step and its repetition."""
