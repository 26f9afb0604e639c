"""What ``medfed COMMAND`` and ``medfed COMMAND`` do: one file per command."""
