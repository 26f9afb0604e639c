"""Tables: their columns, what hospitals agree on, and the data module."""
