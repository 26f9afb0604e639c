"""Tables: their columns, the hospitals' agreement on them, and the data module."""
