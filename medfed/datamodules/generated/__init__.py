"""Generated cohorts, written to disk in the formats of the real data."""
