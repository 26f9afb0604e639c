"""Studies across hospitals that train nothing: a plan says what is counted and summed."""
