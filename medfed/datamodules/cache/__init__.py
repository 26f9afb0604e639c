"""A cache on disk for what is slow to read: built once, in parallel, whole or not used at all."""
