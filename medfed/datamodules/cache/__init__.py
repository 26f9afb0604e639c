"""A cache on disk for data that are slow to read: built once, in parallel, used only if whole."""
