"""Reports of the benchmark: what its cells say, and how surely."""
