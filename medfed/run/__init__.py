"""One run, from its keys to its folder."""
