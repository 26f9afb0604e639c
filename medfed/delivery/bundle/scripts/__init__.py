"""The scripts of a bundle; they need PyTorch and MONAI alone."""
