"""Readers, patches, partitions, splits and generated cohorts."""
