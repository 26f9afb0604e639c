"""One algorithm, one file, one paper."""
