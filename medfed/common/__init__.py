"""Helpers that all other packages use: errors, tensors, seeds, files, console, figures."""
