"""MONAI Bundles: their files, written and read."""
