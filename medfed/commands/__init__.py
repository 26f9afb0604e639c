"""The command line, ``medfed COMMAND``: one file per command."""
