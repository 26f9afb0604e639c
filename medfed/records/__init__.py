"""What a run folder and a cell of a benchmark hold: typed, read and written here alone."""
