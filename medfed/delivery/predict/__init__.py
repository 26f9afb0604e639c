"""What a hospital does with its bundle."""
