"""Weights to start from: files, bundles and finished runs."""
