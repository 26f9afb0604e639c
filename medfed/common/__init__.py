"""Helpers that all other packages use: tensors, seeds, scores, tables, console, figures."""
