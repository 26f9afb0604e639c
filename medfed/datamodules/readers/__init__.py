"""Readers: one class per format on disk, all with the interface of `readers.base.Reader`."""
