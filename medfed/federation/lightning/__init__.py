"""A federation under one Lightning Trainer, on one rank or many."""
