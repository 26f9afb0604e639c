"""Advice from a pilot: which method, for whom, at what cost, and what cannot be told."""
