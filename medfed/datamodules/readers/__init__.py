"""Readers: one file per format on disk; `readers.base` defines their interface."""
