"""Readers: one file per format on disk; `readers.base` says what a reader offers."""
