"""From a finished run to a bundle per hospital."""
