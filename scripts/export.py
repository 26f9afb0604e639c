"""``medfed export`` from a clone, without installing: see medfed/commands/export.py."""

from medfed.commands.export import main

if __name__ == "__main__":
    main()
