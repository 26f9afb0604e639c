"""The one training loop: what a local step is, and what repeats it."""
