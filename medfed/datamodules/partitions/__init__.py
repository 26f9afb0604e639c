"""Partitions: which patients, labels and channels every client has, and which scanner."""
