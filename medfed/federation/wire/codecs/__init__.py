"""Codecs, which turn tensors into bytes: one file each."""
