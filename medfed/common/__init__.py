"""Helpers that all other packages use: errors, tensors, seeds, files, console, figures.

`errors`, `files` and `checks` are those of `medfed.standalone`, the layer below, as bundles hold
them, too; above it, everyone imports them from here.
"""
