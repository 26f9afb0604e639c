"""The content of run folders and benchmark cells: typed, read and written only here."""
